"""Hugging Face checkpoints: a directory with config.json and safetensors files, or the same from the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from quasar_trt.builders.hf_config import model_config
from quasar_trt.builders.source import Source, check_source_tensors, check_tied
from quasar_trt.builders.tokenizer_files import (
    copy_tokenizer,
    eos_ids,
    has_tokenizer,
    one_line,
    write_generation_config,
)
from quasar_trt.errors import QuasarError
from quasar_trt.json_file import read_json
from quasar_trt.model_config import ModelConfig
from quasar_trt.tensorfile import read_header

_INDEX = "model.safetensors.index.json"
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    _INDEX,
    "tokenizer*",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)


def download(model: str, check: Callable[[ModelConfig], object], trust_remote_code: bool) -> Path:
    """Fetches the files of a hub id that a build needs, the weights only once config.json is known to be buildable.

    `check` and `trust_remote_code` are as in `open_source`; code is fetched only where it is trusted.
    """
    import huggingface_hub
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its retries would bury the one line that counts
    try:
        config = Path(huggingface_hub.hf_hub_download(model, "config.json"))
    except Exception as error:  # the client raises its own, its transport's and the system's exceptions
        raise _hub_error(model, error) from None
    check(model_config(read_json(config), f"{model}/config.json"))
    patterns = [*_HUB_FILES, "*.py"] if trust_remote_code else list(_HUB_FILES)
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        raise _hub_error(model, error) from None


def _hub_error(model: str, error: Exception) -> QuasarError:
    return QuasarError(
        f"'{model}' is no directory or file here, and the hub did not give it: {one_line(error)}; check the name and the network"
    )


class HfSource(Source):
    """A checkpoint directory; tensors are read from their shards one at a time."""

    kind = "huggingface"

    def __init__(self, directory: Path, path: str, check: Callable[[ModelConfig], object], trust_remote_code: bool):
        self.path = path
        self._directory = directory
        self._trust_remote_code = trust_remote_code
        described = directory / "config.json"
        values = read_json(described, "a model is a Hugging Face directory, a GGUF file or a hub id")
        self.config = model_config(values, str(described))
        check(self.config)
        self._shards = _shards(directory)
        found, self._shard_of, problems = _tensor_table(directory, self._shards)
        if any(not (directory / shard).is_file() for shard in self._shards):
            raise QuasarError(f"{directory} cannot be built: {'; '.join(problems)}; download the checkpoint again")
        unexpected = check_source_tensors(found, self.config, str(directory), problems)
        self.names = tuple(found)
        self.notices = [f"unexpected tensors are not used: {', '.join(unexpected)}"] if unexpected else []
        self._has_tokenizer = has_tokenizer(directory, trust_remote_code=trust_remote_code)
        if not self._has_tokenizer:
            self.notices.append("the source has no tokenizer: the engine takes and gives token ids only")
        self._files: dict[str, object] = {}
        generation = directory / "generation_config.json"
        self._generation = read_json(generation) if generation.is_file() else {}
        self.eos_token_ids = eos_ids(self._generation, str(generation)) or eos_ids(values, str(described))
        check_tied(self, str(directory))

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        shard = self._shard_of[name]
        if shard not in self._files:
            self._files[shard] = safe_open(self._directory / shard, framework="pt")
        tensor = self._files[shard].get_tensor(name)
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    def write_tokenizer(self, directory: Path) -> None:
        if self._has_tokenizer:
            copy_tokenizer(self._directory, directory, trust_remote_code=self._trust_remote_code)
        write_generation_config(directory, self._generation, self.eos_token_ids)


def _shards(directory: Path) -> dict[str, list[str] | None]:
    """Shard file -> the tensors that the index expects in it, or None for a single file, which has no index."""
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise QuasarError(f"{directory / _INDEX} has no weight_map from tensor names to file names")
        shards: dict[str, list[str] | None] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, []).append(name)
        return shards
    if (directory / "model.safetensors").is_file():
        return {"model.safetensors": None}
    others = sorted(path.name for path in directory.glob("*.bin"))
    hint = f"; {others[0]} is not read: save the model with safe_serialization=True" if others else ""
    raise QuasarError(f"{directory} has neither model.safetensors nor {_INDEX}{hint}")


def _tensor_table(directory: Path, shards: dict[str, list[str] | None]):
    """(name -> (dtype, shape), name -> shard, problems) from the headers alone."""
    found, shard_of, problems = {}, {}, []
    for shard, indexed in shards.items():
        if not (directory / shard).is_file():
            problems.append(f"shard {shard} is missing ({len(indexed or [])} tensors)")
            continue
        specs = read_header(directory / shard)[0]
        problems += [
            f"{name} is not in {shard}, where the index puts it" for name in indexed or [] if name not in specs
        ]
        for name in specs:
            found[name] = (specs[name].dtype, specs[name].shape)
            shard_of[name] = shard
    return found, shard_of, problems
