"""When a request ends and what it says about it."""

from __future__ import annotations

import pytest

from quasar_trt.sampling_params import SamplingParams
from quasar_trt.stopping import StopChecker


@pytest.mark.parametrize(
    ("name", "params", "eos", "room", "tokens", "expected"),
    [
        ("the model's own end", {}, [2, 7], 99, [4, 2], (2, "stop", None)),
        ("any other id of the list", {}, [2, 7], 99, [4, 7, 5], (2, "stop", 7)),
        ("max_tokens", {"max_tokens": 3}, [2], 99, [4, 4, 4, 4], (3, "length", None)),
        ("context limit", {}, [2], 2, [4, 4, 4], (2, "length", None)),
        ("end at the limit", {"max_tokens": 2}, [2], 99, [4, 2], (2, "stop", None)),
        ("ignore_eos", {"ignore_eos": True, "max_tokens": 3}, [2, 7], 99, [2, 7, 2], (3, "length", None)),
        ("no end ids", {}, [], 99, [0, 0], (2, None, None)),
    ],
)
def test_finish(name, params, eos, room, tokens, expected):
    checker = StopChecker(SamplingParams(**params), eos, room)
    count = 0
    for token in tokens:
        count += 1
        foreseen = checker.finishes(token, 0)
        assert checker.emit(token) == foreseen
        if foreseen:
            break
    assert (count, checker.finish_reason, checker.stop_reason) == expected, name


def test_finishes_looks_ahead_without_changing_anything():
    checker = StopChecker(SamplingParams(max_tokens=3), [2], 99)
    assert [checker.finishes(4, num_before) for num_before in range(4)] == [False, False, True, True]
    assert checker.finishes(2, 0)
    assert (checker.remaining, checker.finish_reason) == (3, None)
