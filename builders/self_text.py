"""Text that the model writes itself: calibration and fidelity need no download.

Every text draws from its own random stream, so it does not depend on the texts written beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.progress import Advance
from quasar_trt.engines import default_engine
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe
from quasar_trt.tokenizer import chat_text, check_ids, encode

_MARK = "<<content>>"


@dataclass
class SelfText:
    """A text in the writing: its ids so far, the length it shall have, its random stream."""

    ids: list[int]
    length: int
    random: np.random.Generator


def new_texts(tokenizer, vocab_size: int, count: int, length: int, seed: int) -> list[SelfText]:
    """`count` beginnings: every other one opens a chat message where the chat template has one, and each goes on with an
    ordinary token drawn from the whole vocabulary, which is what makes the texts varied. `tokenizer` may be None.

    Raises QuasarError when a text begins with a token outside of the vocabulary.
    """
    prefixes, ordinary = [[]], list(range(vocab_size))
    if tokenizer is not None:
        added = set(tokenizer.get_added_vocab().values())
        ordinary = [i for i in range(min(vocab_size, len(tokenizer))) if i not in added]
        prefixes = [encode(tokenizer, "")]
        if tokenizer.chat_template:
            prefixes += _chat_prefix(tokenizer)
    for prefix in prefixes:
        check_ids(prefix, vocab_size, "the beginning of a text by this tokenizer")
    texts = []
    for i in range(count):
        random = np.random.default_rng([seed, i])
        start = [*prefixes[i % len(prefixes)], ordinary[random.integers(len(ordinary))]]
        texts.append(SelfText(start[:length], length, random))
    return texts


def _chat_prefix(tokenizer) -> list[list[int]]:
    """The ids before a user's first words; none where the template refuses a conversation of one message, as templates that
    insist on a system message do."""
    try:
        opening = chat_text(tokenizer, [{"role": "user", "content": _MARK}], add_generation_prompt=False)
    except QuasarError:
        return []
    return [tokenizer(opening.split(_MARK)[0], add_special_tokens=False)["input_ids"]]


def write(engine: Engine, texts: Sequence[SelfText], advance: Advance) -> None:
    """Lets `engine` continue every text to its length, at temperature 1. Calls `advance(1)` per token of the longest.

    End-of-text tokens are followed like any other: what a model writes after one is as varied as before.
    """
    rows = engine.capabilities.max_rows
    sequences = [engine.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        for start in range(0, len(text.ids) - 1, rows):
            chunk = text.ids[start : min(start + rows, len(text.ids) - 1)]
            engine.step([SequenceStep(sequence, chunk, needs_logits=False)], _never)
    shortest = min(len(text.ids) for text in texts)
    advance(shortest)
    while growing := [pair for pair in zip(sequences, texts, strict=True) if len(pair[1].ids) < pair[1].length]:
        for start in range(0, len(growing), rows):
            _write_one(engine, growing[start : start + rows])
        advance(1)
    for sequence in sequences:
        engine.close(sequence)


def _write_one(engine: Engine, growing: Sequence[tuple[int, SelfText]]) -> None:
    """One pass: a token for each text, drawn through the inverse CDF."""

    def accept(index: int, logits: np.ndarray) -> Acceptance:
        text = growing[index][1]
        cumulated = np.exp(logits[0] - logits[0].max()).cumsum(dtype=np.float64)
        token = int(np.searchsorted(cumulated, text.random.random() * cumulated[-1], side="right"))
        text.ids.append(min(token, len(cumulated) - 1))
        return Acceptance((text.ids[-1],), 0)

    engine.step([SequenceStep(sequence, [text.ids[-1]]) for sequence, text in growing], accept)


def _never(index: int, logits: np.ndarray) -> Acceptance:
    raise AssertionError("a pass without logits asked for acceptance")


@contextmanager
def source_engine(source: Converter, max_seq_len: int, scratch: Path) -> Iterator[Engine]:
    """The source model as an engine, unquantized: the fast one, from a temporary file below `scratch`, where this machine
    has it."""
    recipe = Recipe("none")
    if default_engine() != "cpu":
        # a pass per token: converting BF16 weights in each of them would take longer than the pass
        widened = {name: source[name].float() for name in source}
        yield ReferenceEngine(ReferenceModel(source.config, recipe, widened), max_seq_len=max_seq_len)
        return
    from quasar_trt.engines.cpu import CpuEngine

    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        path = Path(directory) / "rank0.engine"
        compile_cpu(source.config, recipe, _Rounded(source), path)
        yield CpuEngine(path, max_seq_len=max_seq_len)


class _Rounded(Mapping[str, torch.Tensor]):
    """A source's tensors as BF16, each read and rounded when it is asked for."""

    def __init__(self, source: Converter):
        self._source = source

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[name].to(torch.bfloat16)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
