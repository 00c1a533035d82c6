"""The tokenizer inside a GGUF file, rebuilt so that its ids equal the original's.

A GGUF file keeps vocabulary, merges or scores, and the name of the pre-tokenizer (`tokenizer.ggml.pre`), not the
pre-tokenizer itself: that part is data here.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quasar_trt.errors import QuasarError, unknown

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "▁"  # SentencePiece's visible space
# The split published in Llama 3's tokenizer.json.
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool = True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


# tokenizer.ggml.pre -> (pre-tokenizer, whether a whole word in the vocabulary skips the merges, whether BOS is added unless
# the file says otherwise)
_PRE_TOKENIZERS: dict[str, tuple[Callable, bool, bool]] = {
    "gpt-2": (_byte_level, False, False),
    "smollm": (
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
        False,
        False,
    ),
    "llama-bpe": (
        lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), _byte_level(use_regex=False)]
        ),
        True,
        True,
    ),
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
        tokenizer, adds_bos = _sentencepiece_bpe(field, tokens, vocabulary), True
    else:
        raise unknown(f"tokenizer.ggml.model in {where}", str(kind), ("gpt2", "llama"))
    for token, token_type in zip(tokens, field("ggml.token_type") or [], strict=False):
        if token_type in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {role: field(f"ggml.{name}_token_id") for name, role in roles.items()}
    values = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if field("ggml.add_bos_token") is not None:
        adds_bos = field("ggml.add_bos_token")
    if adds_bos and "bos_token" in values:
        bos = values["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids["bos"])]
        )
    if field("chat_template"):
        values["chat_template"] = field("chat_template")
    return tokenizer, values


def _byte_level_bpe(field: Callable, vocabulary: dict[str, int], where: str) -> tuple[Tokenizer, bool]:
    name = field("ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise unknown(f"pre-tokenizer (tokenizer.ggml.pre) in {where}", str(name), _PRE_TOKENIZERS)
    pre_tokenizer, ignore_merges, adds_bos = _PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, adds_bos


def _sentencepiece_bpe(field: Callable, tokens: list[str], vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece joins the pair whose result scores best: as merges, all splits of all tokens by falling score."""
    scores = field("ggml.scores") or [0.0] * len(tokens)
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in known]
    merges.sort(key=lambda item: item[0], reverse=True)
    unknown_id = field("ggml.unknown_token_id")
    unknown_token = tokens[0 if unknown_id is None else unknown_id]
    pairs = [pair for _, pair in merges]
    model = models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    prefixed = field("ggml.add_space_prefix") is not False
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer
