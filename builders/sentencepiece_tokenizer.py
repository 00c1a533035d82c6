"""SentencePiece vocabularies as fast tokenizers: from a tokenizer.model, read as data, or from the tables of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quasar_trt.errors import QuasarError

# Kinds of pieces, the same in tokenizer.model and in a GGUF file's tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_BPE = 2  # trainer_spec.model_type
_SPACE = "▁"  # SentencePiece's visible space


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary, whose id is its place in the list."""

    text: str
    score: float
    kind: int


def sentencepiece_bpe(
    pieces: Sequence[Piece],
    *,
    unknown_id: int,
    byte_fallback: bool = True,
    prefix: str | None = "each",
    before: Sequence[normalizers.Normalizer] = (),
    whole: Sequence[str] = (),
) -> Tokenizer:
    """A tokenizer with SentencePiece's BPE: the pair of neighbours is joined whose joint piece scores best.

    prefix: where a space is put before the text: before "each" stretch between added tokens, before the "first" only, or
        None. before: what normalizes the text ahead of that. whole: pieces that are found in the text ahead of joining.
    """
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(pieces),
            unk_token=pieces[unknown_id].text,
            fuse_unk=True,
            byte_fallback=byte_fallback,
            ignore_merges=bool(whole),  # a stretch that is one of `whole` has no merges that make it
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prepend = [normalizers.Prepend(_SPACE)] if prefix == "each" else []
    tokenizer.normalizer = normalizers.Sequence([*before, *prepend, spaces])
    splits = []
    if prefix == "first":
        splits.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if whole:
        longest_first = sorted(whole, key=len, reverse=True)
        splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every split of every normal piece into two others, by falling score of the piece."""
    normal = {piece.text: i for i, piece in enumerate(pieces) if piece.kind == NORMAL}
    merges = []
    for text, i in normal.items():
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in normal and pair[1] in normal]
        known.sort(key=lambda pair: (normal[pair[0]], normal[pair[1]]))
        merges += [(pieces[i].score, pair) for pair in known]
    merges.sort(key=lambda item: item[0], reverse=True)
    return [pair for _, pair in merges]


def add_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Every text gets `bos` before it and `eos` behind it, where they are not None."""
    ends = {end: tokenizer.token_to_id(end) for end in (bos, eos) if end is not None}
    if ends:
        single = " ".join(part for part in (bos, "$A", eos) if part is not None)
        pair = f"{single} {single.replace('$A', '$B')}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(ends.items())
        )


def read_tokenizer_model(path: Path, added: Mapping[int, AddedToken], *, prefix: str | None) -> Tokenizer:
    """The tokenizer in the SentencePiece model `path`.

    added: id -> token that is found in the text before anything else is done to it, as are SentencePiece's control pieces;
        ids beyond the model's vocabulary follow it. prefix: as in `sentencepiece_bpe`, where the model itself asks for one.

    Raises QuasarError for a file that cannot be read, for another algorithm than BPE, for a treatment of spaces that cannot
    be kept, and for an added token whose id contradicts the vocabulary.
    """
    model = _parse(path)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != _BPE:
        raise QuasarError(f"{path} is a SentencePiece model of type {trainer.model_type}; only BPE (2) is supported")
    if not normalizer.escape_whitespaces or trainer.treat_whitespace_as_suffix:
        raise QuasarError(f"{path} keeps spaces in a way that is not supported; only a visible space before words is")
    pieces = [Piece(piece.piece, piece.score, piece.type) for piece in model.pieces]
    unknown_id = next((i for i, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    if unknown_id is None:
        raise QuasarError(f"{path} has no unknown piece; it is not a whole SentencePiece model")
    before: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        before.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        before += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer = sentencepiece_bpe(
        pieces,
        unknown_id=unknown_id,
        byte_fallback=trainer.byte_fallback,
        prefix=prefix if normalizer.add_dummy_prefix else None,
        before=before,
        whole=[piece.text for i, piece in enumerate(pieces) if piece.kind == USER_DEFINED and i not in added],
    )
    control = {
        i: AddedToken(piece.text, special=True, normalized=False)
        for i, piece in enumerate(pieces)
        if piece.kind in (CONTROL, UNKNOWN)
    }
    for i, token in sorted((control | dict(added)).items()):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != i:
            raise QuasarError(
                f"token '{token.content}' has id {tokenizer.token_to_id(token.content)} by {path}, {i} by the files beside it; "
                "get an intact copy of the tokenizer"
            )
    return tokenizer


def _parse(path: Path):
    """The file's ModelProto."""
    from transformers.convert_slow_tokenizer import import_protobuf

    try:
        from google.protobuf.message import DecodeError

        model = import_protobuf().ModelProto()  # a second definition of it, ours, would clash with transformers' choice
    except ImportError:
        raise QuasarError(
            f"reading {path} needs the protobuf package: pip install 'quasar-trt[sentencepiece]'"
        ) from None
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        model.Clear()
    if not model.pieces:
        raise QuasarError(f"{path} is not a SentencePiece model; download it again")
    return model
