"""The picture of a fidelity report: the relative error that each layer leaves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quasar_trt.errors import QuasarError


def check_plot(path: Path) -> None:
    """Raises QuasarError, before a long run, without matplotlib and for a name that is no PNG file's."""
    if path.suffix.lower() != ".png":
        raise QuasarError(f"--plot: {path} is written as PNG; give a name that ends in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QuasarError("--plot needs matplotlib, which is missing; pip install 'quasar-trt[plot]'") from None


def plot(layer_errors: Sequence[float], title: str, path: Path) -> None:
    """Writes a PNG with a bar per layer. layer_errors: as in fidelity.json."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state shared with the caller

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="layer", ylabel="relative error of the hidden state")
    axes.bar(range(len(layer_errors)), layer_errors)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, format="png", dpi=150)
