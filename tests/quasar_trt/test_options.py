"""Every option acts: a value other than the default changes behaviour, and every default is built and used."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from stubs import StubEngine, chain_logits, random_logits

from quasar_trt.drafters import DRAFTERS, make_drafter
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

# field -> a value that must change what `generate(seed=1)` gives; the engine's end-of-sequence id is 3
SAMPLING = {
    "temperature": 0.0,
    "top_k": 1,
    "top_p": 0.2,
    "seed": 5,
    "max_tokens": 1,
    "ignore_eos": True,
}
# drafter -> option -> a value that must change what is proposed
DRAFTER = {
    "ngram": {
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 1,
        "prompt_lookup_min": 3,
    },
    "suffix": {"num_speculative_tokens": 2, "history_tokens": 100},
}
DRAFTER_CONTEXT = [1, 2, 7, 6, 5, 4, 3, 8, 2, 1, 2]
DRAFTER_ANSWER = [8, 2, 1, 2, 9, 9]
OPTIONS = [(name, *item) for name, options in DRAFTER.items() for item in options.items()]


def generate(**settings) -> list[int]:
    engine = StubEngine(random_logits(5, seed=2), 5)
    params = SamplingParams(**settings)
    return Runner(engine, eos_token_ids=[3]).generate([1, 2], params)[0].outputs[0].token_ids


def propose(name: str, **options) -> tuple[int, ...]:
    """The draft that comes with DRAFTER_CONTEXT, after a request that emitted DRAFTER_ANSWER."""
    runner = Runner(
        engine := StubEngine(chain_logits(DRAFTER_ANSWER, 1, 10), 10),
        drafter=make_drafter(name, options),
        max_batch_size=1,
    )
    runner.generate([[0], DRAFTER_CONTEXT], SamplingParams(temperature=0, max_tokens=len(DRAFTER_ANSWER)))
    return next(step.drafts[-1] for step in engine.passes if step.tokens[-1] == DRAFTER_CONTEXT)


def test_tables_name_every_field():
    assert set(SAMPLING) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(DRAFTER) == set(DRAFTERS)
    for name, (_, options_class) in DRAFTERS.items():
        assert set(DRAFTER[name]) == {field.name for field in dataclasses.fields(options_class)}


@pytest.mark.parametrize(("field", "value"), SAMPLING.items())
def test_sampling_parameter_acts(field, value):
    assert value != next(f.default for f in dataclasses.fields(SamplingParams) if f.name == field)
    assert generate(**{"seed": 1} | {field: value}) != generate(seed=1)


@pytest.mark.parametrize(("name", "option", "value"), OPTIONS)
def test_drafter_option_acts(name, option, value):
    drafter = make_drafter(name, {option: value})
    assert getattr(drafter.options, option) == value
    assert value != next(f.default for f in dataclasses.fields(DRAFTERS[name][1]) if f.name == option)
    assert propose(name, **{option: value}) != propose(name)


def test_every_default_works():
    assert 0 < len(generate()) <= 16
    for name in DRAFTERS:
        engine = StubEngine(random_logits(5), 5)
        (output,) = Runner(engine, drafter=make_drafter(name)).generate([1, 2, 1])
        assert len(output.outputs[0].token_ids) == 16
    assert make_drafter(None) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temprature=1), "unknown sampling parameter 'temprature'.*did you mean 'temperature'"),
        (lambda: SamplingParams(temperature=-1), "temperature is -1"),
        (lambda: SamplingParams(temperature=math.nan), "temperature is nan"),
        (lambda: SamplingParams(top_p=0), "top_p is 0"),
        (lambda: SamplingParams(top_k=-2), "top_k is -2"),
        (lambda: SamplingParams(seed=2**63), "seed is"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens is 0"),
        (lambda: SamplingParams(temperature="1"), "temperature is '1'; allowed: 0 .greedy. or more"),
        (lambda: SamplingParams(temperature=True), "temperature is True; allowed"),
        (lambda: SamplingParams(temperature=None), "temperature is None; allowed"),
        (lambda: SamplingParams(temperature=math.inf), "temperature is inf; allowed"),
        (lambda: SamplingParams(temperature=10**400), "temperature is 1000.*; allowed"),
        (lambda: SamplingParams(top_p="0.5"), "top_p is '0.5'; allowed: a number above 0"),
        (lambda: SamplingParams(top_p=True), "top_p is True; allowed"),
        (lambda: SamplingParams(top_k=2.0), "top_k is 2.0; allowed: a positive integer"),
        (lambda: SamplingParams(top_k=True), "top_k is True; allowed"),
        (lambda: SamplingParams(seed=1.5), "seed is 1.5; allowed: a 64-bit integer"),
        (lambda: SamplingParams(seed="1"), "seed is '1'; allowed"),
        (lambda: SamplingParams(seed=False), "seed is False; allowed"),
        (lambda: SamplingParams(max_tokens=True), "max_tokens is True; allowed: an integer of at least 1"),
        (lambda: SamplingParams(max_tokens=None), "max_tokens is None; allowed"),
        (lambda: SamplingParams(ignore_eos=1), "ignore_eos is 1; allowed: True or False"),
        (lambda: SamplingParams(ignore_eos="no"), "ignore_eos is 'no'; allowed"),
        (lambda: make_drafter("n-gram", {}), "unknown drafter 'n-gram'.*did you mean 'ngram'"),
        (lambda: make_drafter("ngram", {"num_speculative_token": 3}), "did you mean 'num_speculative_tokens'"),
        (lambda: make_drafter("ngram", {"prompt_lookup_min": 4}), "prompt_lookup_min is 4; allowed: at most"),
        (lambda: make_drafter("ngram", {"prompt_lookup_max": "3"}), "prompt_lookup_max is '3'; allowed: an integer"),
        (lambda: make_drafter("ngram", {"num_speculative_tokens": True}), "is True; allowed: an integer of at least 1"),
        (lambda: make_drafter("ngram", {"prompt_lookup_min": 1.0}), "prompt_lookup_min is 1.0; allowed: an integer"),
        (lambda: make_drafter("ngram", {"num_speculative_tokens": 0}), "num_speculative_tokens is 0"),
        (lambda: make_drafter("suffix", {"num_speculative_tokens": "3"}), "num_speculative_tokens is '3'; allowed"),
        (
            lambda: make_drafter("suffix", {"history_tokens": -1}),
            "history_tokens is -1; allowed: an integer of at least 0",
        ),
        (lambda: make_drafter("suffix", {"history_tokens": 1e4}), "history_tokens is 10000.0; allowed"),
        (lambda: make_drafter(None, {"num_speculative_tokens": 3}), "without a drafter"),
    ],
)
def test_bad_value_is_named(make, message):
    with pytest.raises(QuasarError, match=message):
        make()


def test_numpy_numbers_are_taken_as_pythons():
    params = SamplingParams(np.float32(0.5), np.uint8(2), np.float64(0.75), np.int64(-3), np.int8(5))
    assert params == SamplingParams(0.5, 2, 0.75, -3, 5)
    values = [getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed", "max_tokens")]
    assert [type(value) for value in values] == [float, int, float, int, int]
    engine = StubEngine(random_logits(5), 5)
    assert len(Runner(engine).generate([1], params)[0].outputs[0].token_ids) == 5
