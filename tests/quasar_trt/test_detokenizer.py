"""Streamed text: whole characters, each said once."""

from __future__ import annotations

from functools import partial

import pytest
from stubs import ByteTokenizer

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.tokenizer import decode

byte_decode = partial(decode, ByteTokenizer())


def pieces(data: bytes, per_step: int, decode=byte_decode) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [
        detokenizer.push(list(data[i : i + per_step]), final=i + per_step >= len(data))
        for i in range(0, len(data), per_step)
    ]


@pytest.mark.parametrize("per_step", [1, 2, 5])
@pytest.mark.parametrize("text", ["é世🙂", "plain", " a  b ", "x世界yé", "🙂🙂🙂"])
def test_deltas_join_to_the_text_without_half_characters(text, per_step):
    found = pieces(text.encode(), per_step)
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)


def test_character_cut_by_the_end_becomes_one_replacement():
    assert pieces("a🙂".encode()[:3], 1) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("per_step", [1, 3])
def test_invalid_bytes_are_shown_once(per_step):
    data = b"ab\xff\xff\xe4cd\xff"
    assert "".join(pieces(data, per_step)) == data.decode(errors="replace")


def test_special_tokens_give_no_text():
    detokenizer = Detokenizer(byte_decode)
    assert detokenizer.push([104, 105, 256], final=True) == "hi"


def test_leading_space_that_a_tokenizer_drops_is_kept_inside():
    """A tokenizer that drops the first space of whatever it decodes."""
    found = pieces(b" a b c", 1, decode=lambda ids: bytes(ids).decode().removeprefix(" "))
    assert "".join(found) == "a b c"


def test_characters_made_of_byte_tokens_that_fail_together():
    """A tokenizer that shows one replacement per byte of a run until the whole run is valid."""

    def byte_fallback(ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    assert "".join(pieces("é世🙂".encode(), 1, decode=byte_fallback)) == "é世🙂"
