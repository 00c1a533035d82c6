"""What every option that draws a picture asks for."""

from __future__ import annotations

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
