"""What the endpoints share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import time

from quasar_trt.async_runner import AsyncRunner
from quasar_trt.server.errors import ApiError
from quasar_trt.server.metrics import ServerMetrics
from quasar_trt.server.options import ServerOptions
from quasar_trt.server.text import Text
from quasar_trt.server.visits import Visits


@dataclass
class Backend:
    """sampling: the model's own sampling parameters, for what requests leave out.

    max_seq_len: tokens of the longest sequence; vocab_size: of the model.
    visits: HTTP requests that are open. draining: whether new ones are turned away.
    """

    runner: AsyncRunner
    text: Text
    options: ServerOptions
    sampling: Mapping[str, object]
    max_seq_len: int
    vocab_size: int
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    visits: Visits = field(default_factory=Visits)
    draining: bool = False
    created: int = field(default_factory=lambda: int(time()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is served."""
        served = self.options.served_model_name
        if name is not None and name != served:
            raise ApiError(404, f"model is {name!r}; allowed: {served!r}", "model", "model_not_found")

    def check_count(self, num_completions: int) -> None:
        """Raises ApiError for more completions than can ever run or wait, and RunnerBusy for more than can now."""
        if num_completions > (most := self.options.max_requests):
            raise ApiError(400, f"{num_completions} completions are asked for; allowed: {most} at a time", "n")
        self.runner.check_room(num_completions)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raises ApiError for token ids that are none of the model's, in the parameter `name`."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ApiError(400, f"{name} has token id {wrong}; allowed: 0 to {self.vocab_size - 1}", name)

    def drafts(self, drafter: str | None) -> bool:
        """Whether a request that asks for this drafter is drafted. Raises ApiError for one that is not there."""
        served = self.options.drafter
        if drafter not in (None, "none", served):
            names = " or ".join(dict.fromkeys((f"'{served}'", "'none'")))
            raise ApiError(400, f"drafter is {drafter!r}; allowed: {names}", "drafter")
        return drafter != "none"
