"""How fast tokens come: decode tokens over decode seconds, the prompt's own pass excluded."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from quasar_trt.outputs import StreamOutput


class DecodeClock:
    """Times streams. The clock of each runs from the arrival of its first piece to the arrival of its last; the tokens of
    the first piece do not count, because they come with the prompt's pass."""

    def __init__(self):
        self.tokens = 0
        self.seconds = 0.0

    def time(self, stream: Iterable[StreamOutput]) -> Iterator[StreamOutput]:
        """Passes the stream on."""
        previous = None
        for output in stream:
            now = time.perf_counter()
            if previous is not None:
                self.tokens += len(output.token_ids)
                self.seconds += now - previous
            previous = now
            yield output

    @property
    def tokens_per_second(self) -> float | None:
        """None when no stream had a second piece."""
        return self.tokens / self.seconds if self.tokens else None
