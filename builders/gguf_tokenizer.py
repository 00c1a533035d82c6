"""The tokenizer inside a GGUF file, rebuilt so that its ids equal the original's.

A GGUF file keeps vocabulary, merges or scores, and the name of the pre-tokenizer (`tokenizer.ggml.pre`), not the
pre-tokenizer itself: that part is data here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quasar_trt.builders.sentencepiece_tokenizer import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    add_ends,
    sentencepiece_bpe,
)
from quasar_trt.errors import QuasarError, unknown

# The splits published in the tokenizer.json of Llama 3 and of Qwen2, which differ in how many digits stay together, and of
# Mistral's tekken vocabulary.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2_SPLIT = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


@dataclass(frozen=True)
class _Words:
    """How a text falls into the words whose bytes are merged.

    split: the expression whose matches are words; None is GPT-2's. digits: each digit stands alone, before that.
    ignore_merges: a whole word in the vocabulary skips the merges. adds_bos: unless the file says otherwise.
    """

    split: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizer: normalizers.Normalizer | None = None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.split:
            steps.append(pre_tokenizers.Split(Regex(self.split), "isolated"))
        return pre_tokenizers.Sequence([*steps, _byte_level(use_regex=self.split is None)])


_LLAMA3 = _Words(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
# by tokenizer.ggml.pre
_PRE_TOKENIZERS = {
    "gpt-2": _Words(),
    "smollm": _Words(digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Words(_QWEN2_SPLIT, normalizer=normalizers.NFC()),
    "tekken": _Words(_TEKKEN_SPLIT, ignore_merges=True, adds_bos=True),
}


def build_tokenizer(field: Callable[[str], object], where: str) -> tuple[Tokenizer, dict]:
    """(tokenizer, values for tokenizer_config.json). `field` gives a metadata value below `tokenizer.`, or None.

    Raises QuasarError naming a tokenizer or pre-tokenizer that is not known: a guess would give other ids.
    """
    kind = field("ggml.model")
    tokens = field("ggml.tokens")
    if tokens is None:
        raise QuasarError(f"{where} has no tokenizer.ggml.tokens; use a GGUF file that contains its tokenizer")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(field, vocabulary, where)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(field, tokens, where), True
    else:
        raise unknown(f"tokenizer.ggml.model in {where}", str(kind), ("gpt2", "llama"))
    kinds = list(zip(tokens, field("ggml.token_type") or [], strict=False))
    # All at once: each call prepares the search for all added tokens anew.
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {role: field(f"ggml.{name}_token_id") for name, role in roles.items()}
    values = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if field("ggml.add_bos_token") is not None:
        adds_bos = field("ggml.add_bos_token")
    adds_eos = field("ggml.add_eos_token")
    add_ends(tokenizer, values.get("bos_token") if adds_bos else None, values.get("eos_token") if adds_eos else None)
    if field("chat_template"):
        values["chat_template"] = field("chat_template")
    return tokenizer, values


def _byte_level_bpe(field: Callable, vocabulary: dict[str, int], where: str) -> tuple[Tokenizer, bool]:
    name = field("ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise unknown(f"pre-tokenizer (tokenizer.ggml.pre) in {where}", str(name), _PRE_TOKENIZERS)
    words = _PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words.ignore_merges))
    if words.normalizer:
        tokenizer.normalizer = words.normalizer
    tokenizer.pre_tokenizer = words.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.adds_bos


def _sentencepiece(field: Callable, tokens: list[str], where: str) -> Tokenizer:
    kinds = field("ggml.token_type") or [NORMAL] * len(tokens)
    scores = field("ggml.scores")
    if scores is None or not len(scores) == len(kinds) == len(tokens):
        raise QuasarError(
            f"{where} has no tokenizer.ggml.scores and token_type for each token; it is not a whole model"
        )
    unknown_id = field("ggml.unknown_token_id")
    return sentencepiece_bpe(
        [Piece(*entry) for entry in zip(tokens, scores, kinds, strict=True)],
        unknown_id=0 if unknown_id is None else unknown_id,
        prefix=None if field("ggml.add_space_prefix") is False else "each",
    )
