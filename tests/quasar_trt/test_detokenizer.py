"""Streamed text: whole characters, each said once, nothing that a stop text takes back."""

from __future__ import annotations

from functools import partial

import pytest
from stubs import ByteTokenizer

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.tokenizer import decode

byte_decode = partial(decode, ByteTokenizer())


def pieces(data, per_step: int = 1, decode=byte_decode, stop=(), include_stop=False) -> list[str]:
    """What is said after each step; after the end the text is what was said."""
    detokenizer = Detokenizer(decode, stop, include_stop)
    said, found = [], None
    for begin in range(0, len(data), per_step):
        for token in data[begin : begin + per_step]:
            found = found or detokenizer.find_stop(detokenizer.push(token))
            if found:
                break
        if found or begin + per_step >= len(data):
            detokenizer.end()
        said.append(detokenizer.say())
        if found:
            break
    assert "".join(said) == detokenizer.text
    return said


@pytest.mark.parametrize("per_step", [1, 2, 5])
@pytest.mark.parametrize("text", ["é世🙂", "plain", " a  b ", "x世界yé", "🙂🙂🙂"])
def test_deltas_join_to_the_text_without_half_characters(text, per_step):
    found = pieces(text.encode(), per_step)
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)


def test_character_cut_by_the_end_becomes_one_replacement():
    assert pieces("a🙂".encode()[:3]) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("per_step", [1, 3])
def test_invalid_bytes_are_shown_once(per_step):
    data = b"ab\xff\xff\xe4cd\xff"
    assert "".join(pieces(data, per_step)) == data.decode(errors="replace")


def test_special_tokens_give_no_text():
    assert "".join(pieces([104, 105, 256])) == "hi"


def test_leading_space_that_a_tokenizer_drops_is_kept_inside():
    """A tokenizer that drops the first space of whatever it decodes."""
    found = pieces(b" a b c", decode=lambda ids: bytes(ids).decode().removeprefix(" "))
    assert "".join(found) == "a b c"


def test_characters_made_of_byte_tokens_that_fail_together():
    """A tokenizer that shows one replacement per byte of a run until the whole run is valid."""

    def byte_fallback(ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    assert "".join(pieces("é世🙂".encode(), decode=byte_fallback)) == "é世🙂"


@pytest.mark.parametrize("per_step", range(1, 14))
@pytest.mark.parametrize(("include", "text"), [(False, "xx"), (True, "xxEND")])
def test_stop_text_within_and_across_steps(per_step, include, text):
    assert "".join(pieces(b"xxENDyyyyyyyy", per_step, stop=["END"], include_stop=include)) == text


def test_what_may_begin_a_stop_text_is_held_back_until_it_is_decided():
    assert pieces(b"xENENDz", stop=["END"]) == ["x", "", "", "EN", "", ""]
    assert pieces(b"aEbEN", stop=["END", "bE!"]) == ["a", "", "E", "", "bEN"]


def test_stop_text_within_one_token():
    """Tokens of several characters: 0 is "a stop b st", 1 is "op c"."""
    texts = ["a stop b st", "op c", "stop"]

    def whole(ids):
        return "".join(texts[token] for token in ids)

    assert pieces([0, 1], decode=whole, stop=["stop"]) == ["a "]
    assert pieces([0, 1], decode=whole, stop=["st", "stop"]) == ["a "]
    assert pieces([0, 1], decode=whole, stop=["stop", "b s", "st"]) == ["a "]
    assert pieces([0, 1], decode=whole, stop=["b stop"], include_stop=True) == ["a stop ", "b stop"]
    assert pieces([1, 2], decode=whole, stop=["p", "op"], include_stop=True) == ["op"]
    assert pieces([1, 2], decode=whole, stop=["cs"]) == ["op ", ""]


def test_stop_text_found_before_is_not_found_again():
    detokenizer = Detokenizer(byte_decode, ["ab"])
    for token in b"ab":
        detokenizer.push(token)  # not looked for: the request has to go on
    assert detokenizer.say() == "ab"
    assert detokenizer.find_stop(detokenizer.push(ord("c"))) is None
    assert detokenizer.say() == "c"


def test_copy_goes_on_by_itself():
    detokenizer = Detokenizer(byte_decode, ["END"])
    for token in "世".encode()[:2]:
        detokenizer.push(token)
    other = detokenizer.copy()
    for token in b"\x96EN":
        other.push(token)
    assert (detokenizer.text, other.text) == ("", "世EN")
    detokenizer.push(0x96)
    assert (detokenizer.say(), other.say()) == ("世", "世")


def test_bytes_that_never_become_a_character_are_not_decoded_over_and_over():
    lengths = []

    def counted(ids):
        lengths.append(len(ids))
        return byte_decode(ids)

    said = pieces([0x80] * 1000, decode=counted)
    assert "".join(said) == "\ufffd" * 1000
    assert max(lengths) <= 128 and said.count("") < 990
