"""What an operator chooses about the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quasar_trt.errors import QuasarError


@dataclass(frozen=True)
class ServerOptions:
    """served_model_name: what clients call the model. api_key: what they must send with it; None for nothing.

    drafter: name of the runner's drafter, "none" where it has none.
    max_requests: completions that are computed or wait at a time.
    max_body_bytes: of a request's body.
    request_timeout: seconds after which a completion ends with what there is of it; None for no limit.

    Raises QuasarError for a value that is not allowed.
    """

    served_model_name: str
    api_key: str | None = None
    drafter: str = "none"
    max_requests: int = 256
    max_body_bytes: int = 2**20
    request_timeout: float | None = None

    def __post_init__(self):
        if not self.served_model_name.isprintable() or not self.served_model_name:
            raise QuasarError(f"served_model_name is {self.served_model_name!r}; allowed: printable text, not empty")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise QuasarError(
                "api_key is empty or has other characters than printable ASCII; give another (it is not shown here)"
            )
        for name in ("max_requests", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise QuasarError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        seconds = self.request_timeout
        if seconds is not None and not 0 < seconds < math.inf:
            raise QuasarError(f"request_timeout is {seconds}; allowed: seconds, more than 0; leave it out for no limit")
