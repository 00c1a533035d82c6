"""A model to build from: its configuration, its tensors under Hugging Face names, its tokenizer files.

Everything that can be refused is refused while a source is opened, from configuration and tensor tables alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from quasar_trt.architectures import architecture_of
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SOURCE_TYPES = ("BF16", "F16", "F32")
# Buffers that older checkpoints carry; their values follow from the configuration.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias")


class Source(ABC):
    """One opened model.

    kind: "huggingface" or "gguf". path: what the user named.
    eos_token_ids: every id that ends a text. notices: what the manifest has to tell about the conversion.
    names: the Hugging Face names `tensor` answers to.
    """

    kind: str
    path: str
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    notices: list[str]
    names: tuple[str, ...]

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, BF16 or F32 (F16 is widened to F32), Hugging Face row order."""

    @abstractmethod
    def write_tokenizer(self, directory: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json with the chat template, generation_config.json.

        A source without a tokenizer writes generation_config.json only and says so in `notices`.
        """


def open_source(
    model: str, *, check: Callable[[ModelConfig], object] = lambda config: None, trust_remote_code: bool = False
) -> Source:
    """Opens a Hugging Face directory, a GGUF file or a hub id ("organization/name").

    check: raises QuasarError for a configuration that the caller cannot use; called before tensor tables are read or weights
        fetched. trust_remote_code: tokenizer code that a Hugging Face checkpoint brings is run; no other code ever is.

    Raises QuasarError for whatever cannot be built, before any weight is read.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        from quasar_trt.builders.hf_source import HfSource

        return HfSource(path, str(model), check, trust_remote_code)
    if path.is_file():
        from quasar_trt.builders.gguf_source import GgufSource

        return GgufSource(path, check)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        from quasar_trt.builders.hf_source import HfSource, download

        return HfSource(download(model, check, trust_remote_code), model, check, trust_remote_code)
    raise QuasarError(
        f"model '{model}' does not exist; give a Hugging Face directory, a GGUF file or a hub id such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def source_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the configuration calls for, under its Hugging Face name; a tied head is not among them."""
    architecture = architecture_of(config)
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {architecture.embedding: vocabulary}
    for i in range(config.num_hidden_layers):
        prefix = architecture.layer_prefix.format(i=i)
        for norm in architecture.norms.values():
            shapes[prefix + norm] = (config.hidden_size,)
        for norm in architecture.head_norms.values():
            shapes[prefix + norm] = (config.head_size,)
        for linear in architecture.linears:
            for name, rows in linear.sources.items():
                shapes[f"{prefix}{name}.weight"] = (rows(config), linear.in_features(config))
                if linear.bias(config):
                    shapes[f"{prefix}{name}.bias"] = (rows(config),)
    shapes[architecture.final_norm] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[architecture.head] = vocabulary
    return shapes


def check_source_tensors(
    found: Mapping[str, tuple[str, tuple[int, ...]]], config: ModelConfig, where: str, problems: Iterable[str] = ()
) -> list[str]:
    """Compares the tensor table `found` (name -> dtype, shape) with the configuration.

    Returns the names of tensors that no part of the model uses. Raises one QuasarError that lists `problems` and every
    tensor that is missing, of another shape or of a dtype that cannot be read, and every one inside a layer that the
    architecture has no use for: the layer would compute something else without it.
    """
    architecture = architecture_of(config)
    expected = source_shapes(config)
    known = expected | {architecture.head: (config.vocab_size, config.hidden_size)}
    problems = list(problems)
    problems += [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    for name, (dtype, shape) in found.items():
        if name in known and tuple(shape) != known[name]:
            problems.append(f"{name} has shape {list(shape)}, the configuration says {list(known[name])}")
        if name in known and dtype not in _SOURCE_TYPES:
            problems.append(f"{name} has dtype {dtype}, allowed: {', '.join(_SOURCE_TYPES)}")
    unexpected = [name for name in found if name not in known and not _HARMLESS.fullmatch(name)]
    layers = tuple(architecture.layer_prefix.format(i=i) for i in range(config.num_hidden_layers))
    problems += [
        f"unexpected {name} {list(found[name][1])}, {config.architecture} with this configuration has none"
        for name in unexpected
        if name.startswith(layers)
    ]
    if problems:
        raise QuasarError(f"{where} cannot be built: {'; '.join(problems)}")
    return unexpected


def check_tied(source: Source, where: str) -> None:
    """Raises QuasarError when a tied model brings a head of its own that differs from the embedding."""
    architecture = architecture_of(source.config)
    if not source.config.tie_word_embeddings or architecture.head not in source.names:
        return
    if not torch.equal(source.tensor(architecture.head), source.tensor(architecture.embedding)):
        raise QuasarError(
            f"{where} has an lm_head.weight that differs from the embedding, but tie_word_embeddings is true; "
            "set it to false, or remove that tensor"
        )
