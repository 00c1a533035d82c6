"""Published heads: a directory with a config.json and one file of weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quasar_trt.engines.base import Engine
from quasar_trt.errors import QuasarError
from quasar_trt.json_file import read_json

if TYPE_CHECKING:
    from torch import Tensor

EAGLE3_LAYERS = 7  # that a model has at least
WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")


def eagle3_places(num_hidden_layers: int) -> tuple[int, ...]:
    """The layers whose entering states EAGLE-3 reads; none in a model with too few for three different ones."""
    return (2, num_hidden_layers // 2, num_hidden_layers - 3) if num_hidden_layers >= EAGLE3_LAYERS else ()


def read_config(directory: Path) -> dict:
    """config.json of a head. Raises QuasarError."""
    return read_json(directory / "config.json", "a head has config.json and weights")


def read_weights(directory: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a head, and their file: the first of WEIGHT_FILES that is there. Nothing but tensors is unpickled.

    Raises QuasarError.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = next((directory / name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if path is None:
        raise QuasarError(f"{directory} has no weights of a head; one of: {', '.join(WEIGHT_FILES)}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path), path
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise QuasarError(f"{path} cannot be read as tensors ({why}); get an intact copy of the head") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise QuasarError(f"{path} holds something else than tensors by name; get the head's published weights")
    return tensors, path


def check_shapes(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    where: Path,
) -> None:
    """Raises one QuasarError that lists every missing, unexpected or mis-shaped tensor."""
    known = {**expected, **optional}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    problems += [f"unexpected {name} {list(tensors[name].shape)}" for name in tensors if name not in known]
    problems += [
        f"{name} is {list(tensors[name].shape)}, must be {list(shape)}"
        for name, shape in known.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    if problems:
        raise QuasarError(f"{where} does not fit the engine and its config.json: {'; '.join(problems)}")


def check_engine(engine: Engine, drafter: str) -> None:
    """Raises QuasarError for an engine without hidden states."""
    if not engine.capabilities.hidden_states:
        raise QuasarError(
            f"drafter '{drafter}' reads hidden states, which this engine does not give; engines 'cpu', 'reference' and 'tensorrt' of one "
            "rank do, rotated ones where their directory has basis.safetensors: build it again"
        )
