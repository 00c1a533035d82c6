"""The picture of a fidelity report: the relative error that each layer leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot(layer_errors: Sequence[float], title: str, path: Path) -> None:
    """Writes a PNG with a bar per layer. layer_errors: as in fidelity.json."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state shared with the caller

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="layer", ylabel="relative error of the hidden state")
    axes.bar(range(len(layer_errors)), layer_errors)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, format="png", dpi=150)
