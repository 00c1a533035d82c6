"""When a request ends and what it says about it."""

from __future__ import annotations

import pytest
from stubs import ByteTokenizer

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.stopping import StopChecker


def checker(params: SamplingParams, eos=(), room: int = 99) -> StopChecker:
    detokenizer = Detokenizer(ByteTokenizer().decode, params.stop, params.include_stop_str_in_output)
    return StopChecker(params, eos, room, detokenizer)


def feed(stop: StopChecker, tokens) -> int:
    """How many tokens it took; what `ahead` foresees is what happens."""
    ahead = stop.ahead()
    for count, token in enumerate(tokens, start=1):
        foreseen = ahead.emit(token)
        assert stop.emit(token) == foreseen
        if foreseen:
            assert (ahead.finish_reason, ahead.stop_reason) == (stop.finish_reason, stop.stop_reason)
            return count
    return len(tokens)


@pytest.mark.parametrize(
    ("name", "params", "eos", "room", "tokens", "expected"),
    [
        ("the model's own end", {}, [2, 7], 99, [4, 2], (2, "stop", None)),
        ("any other id of the list", {}, [2, 7], 99, [4, 7, 5], (2, "stop", 7)),
        ("max_tokens", {"max_tokens": 3}, [2], 99, [4, 4, 4, 4], (3, "length", None)),
        ("context limit", {}, [2], 2, [4, 4, 4], (2, "length", None)),
        ("no max_tokens", {"max_tokens": None}, [2], 20, [4] * 30, (20, "length", None)),
        ("end at the limit", {"max_tokens": 2}, [2], 99, [4, 2], (2, "stop", None)),
        ("ignore_eos", {"ignore_eos": True, "max_tokens": 3}, [2, 7], 99, [2, 7, 2], (3, "length", None)),
        ("no end ids", {}, [], 99, [0, 0], (2, None, None)),
        ("stop id", {"stop_token_ids": [9]}, [2], 99, [4, 9, 5], (2, "stop", 9)),
        ("stop id is the model's own", {"stop_token_ids": [2]}, [2], 99, [4, 2], (2, "stop", None)),
        (
            "stop id counts with ignore_eos",
            {"stop_token_ids": [2], "ignore_eos": True},
            [2],
            99,
            [4, 2],
            (2, "stop", 2),
        ),
        ("stop text", {"stop": "ab"}, [2], 99, b"xaab", (4, "stop", "ab")),
        ("stop text at the limit", {"stop": "ab", "max_tokens": 3}, [2], 99, b"xab", (3, "stop", "ab")),
        ("stop id before stop text", {"stop": "b", "stop_token_ids": [98]}, [], 99, b"ab", (2, "stop", 98)),
        ("min_tokens passes a stop text over", {"stop": "a", "min_tokens": 2}, [], 99, b"aaba", (4, "stop", "a")),
        ("stop text that ends after min_tokens", {"stop": "ab", "min_tokens": 1}, [], 99, b"ab", (2, "stop", "ab")),
        ("stop text that ends with min_tokens", {"stop": "ab", "min_tokens": 2}, [], 99, b"abab", (4, "stop", "ab")),
        ("end of sequence after min_tokens", {"min_tokens": 2}, [2], 99, [4, 4, 2], (3, "stop", None)),
    ],
)
def test_finish(name, params, eos, room, tokens, expected):
    stop = checker(SamplingParams(**params), eos, room)
    count = feed(stop, list(tokens))
    assert (count, stop.finish_reason, stop.stop_reason) == expected, name


def test_looking_ahead_changes_nothing():
    stop = checker(SamplingParams(max_tokens=3, stop="bc"), [2])
    stop.emit(ord("b"))
    for _ in range(2):
        ahead = stop.ahead()
        assert [ahead.emit(token) for token in b"c"] == [True]
        ahead = stop.ahead()
        assert [ahead.emit(token) for token in b"xx"] == [False, True]
    assert (stop.remaining, stop.finish_reason, stop.detokenizer.text) == (2, None, "b")


@pytest.mark.parametrize(
    ("params", "tokens", "text"),
    [
        ({"stop": "END"}, b"xxEND", "xx"),
        ({"stop": "END", "include_stop_str_in_output": True}, b"xxEND", "xxEND"),
        ({"stop_token_ids": [120]}, b"abx", "ab"),
        ({"stop_token_ids": [120], "include_stop_str_in_output": True}, b"abx", "abx"),
        ({"skip_special_tokens": True}, [97, 256], "a"),
        ({"include_stop_str_in_output": True}, [97, 256], "a"),
        ({"max_tokens": 3}, b"abc", "abc"),
        ({"max_tokens": 3}, "a🙂".encode()[:3], "a\ufffd"),
        ({"stop": ["longer", "er"]}, b"x longer", "x "),
        ({"stop": ["er", "longer"]}, b"x longer", "x long"),
        ({"stop": ["lon", "longer"]}, b"x longer", "x "),
        ({"stop": ["🙂"]}, "ab🙂".encode(), "ab"),
    ],
)
def test_text_ends_where_the_request_does(params, tokens, text):
    stop = checker(SamplingParams(**params), [256])
    feed(stop, list(tokens))
    if stop.finish_reason is None:
        stop.detokenizer.end()
    assert stop.detokenizer.text == text
    assert stop.detokenizer.say() == text
