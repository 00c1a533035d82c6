"""What the inputs of the linears are like."""

from __future__ import annotations

import torch

from quasar_trt.errors import QuasarError

_OUTLIER = 20.0  # a channel this many times the linear's median channel is worth reporting


class InputSizes:
    """Counts dead and outlying input channels of each linear whose input it is shown.

    Raises QuasarError naming a linear whose input is not finite.
    """

    def __init__(self):
        self._dead_channels = 0
        self._outliers: dict[str, float] = {}

    def __call__(self, name: str, x: torch.Tensor) -> None:
        """x [rows, in_features] is all that calibration shows to the linear `name`."""
        largest = x.abs().amax(dim=0)
        if not largest.isfinite().all():
            raise QuasarError(f"calibration reached NaN or infinity at the input of {name}; the model cannot be built")
        self._dead_channels += int((largest == 0).sum())
        ratio = float(largest.max()) / max(float(largest.median()), 1e-30)
        if ratio >= _OUTLIER:
            self._outliers[name] = round(ratio, 1)

    def report(self) -> dict:
        """Channels that were always 0, and for each linear with outliers the ratio of its largest to its median channel."""
        return {"dead_channels": self._dead_channels, "outliers": self._outliers}
