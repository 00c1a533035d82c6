"""What does not seem to pay is tried now and then, lest a cost or an estimate that was once too bad stays so."""

from __future__ import annotations

_SHARE = 0.005  # of the time that passes take


class Trials:
    """Allows what costs extra time, for at most 0.5 % of the time that passes take."""

    def __init__(self):
        self._seconds = 0.0  # that may be spent now

    def allow(self, seconds: float, extra: float) -> bool:
        """Whether what takes `extra` seconds may be tried in a pass of `seconds`; its time is then spent."""
        self._seconds = min(self._seconds + _SHARE * seconds, extra)
        if self._seconds < extra:
            return False
        self._seconds = 0.0
        return True
