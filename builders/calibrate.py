"""The texts that a model is calibrated on, and others to measure it on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.self_text import new_texts, source_engine, write
from quasar_trt.builders.source import Source
from quasar_trt.checkpoint import checkpoint_spec
from quasar_trt.errors import QuasarError
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.tensorfile import total_bytes
from quasar_trt.tokenizer import check_ids, encode

CALIB_SIZE, CALIB_MAX_SEQ_LENGTH = 16, 256

_OWN_TEXT = Path(__file__).parent / "data" / "calibration.txt"
# A model of more BF16 bytes reads the text of the package: writing takes a pass over all weights per token.
_WRITES_ITSELF = 4_000_000_000
# Fidelity is measured on text from this many seeds further on, which calibration cannot have seen.
_UNSEEN_SEED = 1_000_003
_UNSEEN_SAMPLES, _UNSEEN_LENGTH = 8, 128
_FIELDS = ("text", "prompt", "turns")


@dataclass(frozen=True)
class Calibration:
    """What the user asks for: a file or None and the texts that it has, how many samples, tokens of each, the seed of what the model
    writes itself."""

    dataset: Path | None
    texts: list[str]
    size: int
    length: int
    seed: int


@dataclass(frozen=True)
class Texts:
    """Token ids of the calibration texts and where they are from; those of texts to measure fidelity on, of another seed."""

    calibration: list[list[int]] = field(default_factory=list)
    origin: str = ""
    unseen: list[list[int]] = field(default_factory=list)
    unseen_seed: int = 0


def writes_itself(config: ModelConfig) -> bool:
    """Whether the model is small enough to write its own texts."""
    return total_bytes(checkpoint_spec(config, Recipe("none")).values()) <= _WRITES_ITSELF


def calibration_texts(
    source: Source,
    tokenizer,
    recipe: Recipe,
    wanted: Calibration,
    longest: int,
    scratch: Path,
    stages: Stages,
    measured: bool,
) -> Texts:
    """The texts of one build, all that the model writes in one batch.

    tokenizer: None where the source has none. longest: the most tokens that the model allows. scratch: for a temporary file.
    measured: whether the build measures fidelity, if the model writes its own texts.
    Raises QuasarError for a calibration file that gives nothing, and without a tokenizer for any.
    """
    given, origin = [], "self-generated"
    if wanted.dataset is not None:
        if tokenizer is None:
            raise QuasarError(
                f"calib_dataset {wanted.dataset} needs a tokenizer, and {source.path} has none; leave it out"
            )
        given = dataset_ids(
            wanted.dataset, wanted.texts, tokenizer, source.config.vocab_size, wanted.size, wanted.length
        )
        origin = str(wanted.dataset)
        if len(given) < wanted.size:
            source.notices.append(
                f"calibration file {wanted.dataset} has {len(given)} usable texts, {wanted.size} were requested"
            )
    if not writes_itself(source.config):
        if recipe.quantized and not given:
            given, origin = _own_text(source.config.vocab_size, tokenizer, wanted)
        return Texts(given, origin)
    size = wanted.size if recipe.quantized and not given else 0
    unseen_seed = wanted.seed + _UNSEEN_SEED
    texts = new_texts(tokenizer, source.config.vocab_size, size, wanted.length, wanted.seed)
    if measured:
        length = min(_UNSEEN_LENGTH, longest)
        texts += new_texts(tokenizer, source.config.vocab_size, _UNSEEN_SAMPLES, length, unseen_seed)
    if not texts:
        return Texts(given, origin)
    steps = max(text.length for text in texts)
    with source_engine(Converter(source), steps, scratch) as engine:
        write(engine, texts, stages.stage("Writing text", steps))
    ids = [text.ids for text in texts]
    return Texts(given or ids[:size], origin, ids[size:], unseen_seed)


def _own_text(vocab_size: int, tokenizer, wanted: Calibration) -> tuple[list[list[int]], str]:
    """(texts, where they are from) for a model that does not write its own."""
    if tokenizer is None:
        random = np.random.default_rng(wanted.seed)
        return random.integers(vocab_size, size=(wanted.size, wanted.length)).tolist(), "random ids"
    return (
        dataset_ids(_OWN_TEXT, read_dataset(_OWN_TEXT), tokenizer, vocab_size, wanted.size, wanted.length),
        "text of the package",
    )


def read_dataset(path: Path) -> list[str]:
    """The texts of a .txt file (one a line) or a .jsonl file (fields "text", "prompt" or "turns"), blank ones left out.

    Raises QuasarError for an unreadable file, a malformed line, or when nothing usable is left.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise QuasarError(f"calibration file {path} must be .txt (a text per line) or .jsonl ({', '.join(_FIELDS)})")
    try:
        # "utf-8-sig" drops a byte order mark; splitlines() would also cut inside a text, at U+2028 for one.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise QuasarError(f"cannot read calibration file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuasarError(f"calibration file {path} is not UTF-8: {error}") from None
    texts = lines if path.suffix == ".txt" else [_row_text(path, i, line) for i, line in enumerate(lines, 1)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        wanted = "non-empty lines" if path.suffix == ".txt" else f"a non-empty field {', '.join(_FIELDS)}"
        raise QuasarError(f"calibration file {path} has no usable text; it needs {wanted}")
    return texts


def _row_text(path: Path, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise QuasarError(f"line {number} of calibration file {path} is not JSON: {error}") from None
    value = next((row[field] for field in _FIELDS if row.get(field)), "") if isinstance(row, dict) else ""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def dataset_ids(path: Path, texts: list[str], tokenizer, vocab_size: int, count: int, length: int) -> list[list[int]]:
    """The first `count` of the file's texts as token ids, each cut to `length`; fewer when there are fewer.

    Raises QuasarError naming the file when all of these texts encode to nothing, and for an id outside of the vocabulary.
    """
    samples = [encode(tokenizer, text)[:length] for text in texts[:count]]
    samples = [ids for ids in samples if ids]
    if not samples:
        raise QuasarError(
            f"the texts of calibration file {path} encode to no tokens; give text in the model's alphabet"
        )
    for ids in samples:
        check_ids(ids, vocab_size, f"calibration file {path}")
    return samples
