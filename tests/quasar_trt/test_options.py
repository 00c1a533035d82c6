"""Every option acts: a value other than the default changes behaviour, and every default is built and used."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from stubs import StubEngine, chain_logits, random_logits

from quasar_trt.bench.options import BenchOptions, RequestsBenchOptions
from quasar_trt.drafters.base import Drafter
from quasar_trt.drafters.engine import EngineDrafter
from quasar_trt.drafters.registry import DRAFTERS, OPERANDS, make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

# drafter -> option -> a value that must change what is proposed
DRAFTER = {
    "ngram": {
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 1,
        "prompt_lookup_min": 3,
    },
    "recycle": {"num_speculative_tokens": 2},
    "medusa": {"num_speculative_tokens": 2, "top_k": 2, "quantization": "none"},
    "eagle": {"num_speculative_tokens": 2, "depth": 2, "top_k": 2, "quantization": "none"},
    "suffix": {"num_speculative_tokens": 2, "branches": 3, "history_tokens": 100},
    "engine": {
        "num_speculative_tokens": 2,
        "drafter": "none",
        "draft_tokenizer": True,
        "kv_cache_memory_bytes": 4,
    },
}
DRAFTER_CONTEXT = [1, 2, 7, 6, 5, 4, 3, 8, 2, 1, 2]
DRAFTER_ANSWER = [8, 2, 1, 2, 9, 9]
OPTIONS = [(name, *item) for name, options in DRAFTER.items() for item in options.items()]


def generate() -> list[int]:
    engine = StubEngine(random_logits(5, seed=2), 5)
    return Runner(engine, eos_token_ids=[3]).generate([1, 2])[0].outputs[0].token_ids


def propose(drafter: Drafter) -> tuple[int, ...]:
    """The draft that comes with DRAFTER_CONTEXT, after a request that emitted DRAFTER_ANSWER."""
    engine = StubEngine(chain_logits(DRAFTER_ANSWER, 1, 10), 10)
    runner = Runner(engine, drafter=drafter, max_batch_size=1)
    runner.generate([[0], DRAFTER_CONTEXT], SamplingParams(temperature=0, max_tokens=20))
    return next(step.drafts[-1] for step in engine.passes if step.tokens[-1] == DRAFTER_CONTEXT)


def drafts_of(drafter: Drafter, engine_dir) -> list[tuple]:
    """What a drafter that reads hidden states proposes for one request."""
    given, drafts = drafter.propose, []
    drafter.propose = lambda batch: drafts.append(given(batch)) or drafts[-1]
    engine = open_engine(engine_dir, "cpu", threads=1)
    Runner(engine, drafter=drafter).generate([[1, 2, 3]], SamplingParams(temperature=0, ignore_eos=True))
    return [(draft.ids, draft.parents) for (draft,) in drafts if draft]


def made(name: str, dirs: dict, **options) -> tuple[Drafter, object]:
    """A drafter, and a function that tells what it has done."""
    if name not in OPERANDS:
        drafter = make_drafter(name, options)
        return drafter, lambda: propose(drafter)
    if name != "engine":
        drafter = make_drafter(f"{name}:{dirs[name]}", options)
        return drafter, lambda: drafts_of(drafter, dirs["BF16"])
    # Its own vocabulary where that shall matter.
    vocab = 12 if "draft_tokenizer" in options else 10
    engine = StubEngine(random_logits(vocab), vocab)
    drafter = EngineDrafter(engine, **options)

    def effect():
        try:
            return propose(drafter), [step.drafts for step in engine.passes]
        except QuasarError as error:
            return str(error)

    return drafter, effect


def test_tables_name_every_field():
    assert set(DRAFTER) == set(DRAFTERS)
    for name, (_, options_class) in DRAFTERS.items():
        assert set(DRAFTER[name]) == {field.name for field in dataclasses.fields(options_class)}


@pytest.mark.parametrize(("name", "option", "value"), OPTIONS)
def test_drafter_option_acts(engine_dirs, head_dirs, name, option, value):
    dirs = engine_dirs | head_dirs
    default = next(f.default for f in dataclasses.fields(DRAFTERS[name][1]) if f.name == option)
    drafter, effect = made(name, dirs, **{option: value})
    assert getattr(drafter.options, option) == value
    assert value != default
    assert effect() != made(name, dirs, **{option: default})[1]()


def test_every_default_works(engine_dirs, head_dirs):
    assert 0 < len(generate()) <= 16
    for name in head_dirs:
        assert made(name, engine_dirs | head_dirs)[1]()
    for name in DRAFTERS.keys() - head_dirs.keys():
        engine = StubEngine(random_logits(5), 5)
        drafter = EngineDrafter(StubEngine(random_logits(5), 5)) if name == "engine" else make_drafter(name)
        (output,) = Runner(engine, drafter=drafter).generate([1, 2, 1])
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
        (lambda: SamplingParams(ignore_eos=1), "ignore_eos is 1; allowed: True or False"),
        (lambda: SamplingParams(ignore_eos="no"), "ignore_eos is 'no'; allowed"),
        (lambda: SamplingParams(n=0), "n is 0; allowed: an integer of at least 1"),
        (lambda: SamplingParams(n=2, temperature=0), "n is 2; allowed: 1 at temperature 0"),
        (lambda: SamplingParams(presence_penalty=2.5), "presence_penalty is 2.5; allowed: -2 to 2"),
        (lambda: SamplingParams(frequency_penalty=-3), "frequency_penalty is -3; allowed: -2 to 2"),
        (lambda: SamplingParams(repetition_penalty=0), "repetition_penalty is 0; allowed: a finite number above 0"),
        (lambda: SamplingParams(repetition_penalty=math.inf), "repetition_penalty is inf"),
        (lambda: SamplingParams(min_p=1.5), "min_p is 1.5; allowed: 0 to 1"),
        (lambda: SamplingParams(stop=""), "stop is ''; allowed: a text that is not empty"),
        (lambda: SamplingParams(stop=["a", ""]), r"stop is \['a', ''\]; allowed"),
        (lambda: SamplingParams(stop=5), "stop is 5; allowed"),
        (lambda: SamplingParams(stop_token_ids=[-1]), r"stop_token_ids is \[-1\]; allowed: a list of token ids"),
        (lambda: SamplingParams(stop_token_ids=5), "stop_token_ids is 5; allowed"),
        (lambda: SamplingParams(bad_words="word"), "bad_words is 'word'; allowed: a list of texts"),
        (lambda: SamplingParams(min_tokens=-1), "min_tokens is -1; allowed: an integer of at least 0"),
        (lambda: SamplingParams(min_tokens=17), "min_tokens is 17; allowed: at most max_tokens, which is 16"),
        (lambda: SamplingParams(logprobs=-2), "logprobs is -2; allowed: 0 or more, -1"),
        (lambda: SamplingParams(logprobs=True), "logprobs is True; allowed"),
        (lambda: SamplingParams(prompt_logprobs=1.5), "prompt_logprobs is 1.5; allowed"),
        (lambda: SamplingParams(logit_bias=[5]), r"logit_bias is \[5\]; allowed: a mapping of token ids to finite"),
        (lambda: SamplingParams(logit_bias={5: math.inf}), "logit_bias is {5: inf}; allowed"),
        (lambda: SamplingParams(logit_bias={"x": 1}), "logit_bias is {'x': 1}; allowed"),
        (lambda: SamplingParams(allowed_token_ids=[]), r"allowed_token_ids is \[\]; allowed: a list of at least one"),
        (lambda: SamplingParams(skip_special_tokens=None), "skip_special_tokens is None; allowed: True or False"),
        (lambda: SamplingParams(logits_processors=[3]), r"logits_processors is \[3\]; allowed: a list of callables"),
        (lambda: SamplingParams(best_of=2), "unknown sampling parameter 'best_of'"),
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
            "history_tokens is -1; allowed: 0, or an integer of at least 6",
        ),
        (lambda: make_drafter("suffix", {"history_tokens": 1e4}), "history_tokens is 10000.0; allowed"),
        (lambda: make_drafter("engine", {}), "drafter is 'engine'; allowed: engine:DIR"),
        (lambda: make_drafter("engine:", {}), "drafter is 'engine:'; allowed: engine:DIR"),
        (
            lambda: make_drafter("ngram:dir", {}),
            "unknown drafter 'ngram:dir'; one of: eagle:DIR, engine:DIR, medusa:DIR, ngram, recycle, suffix",
        ),
        (lambda: make_drafter("engine:nowhere", {}), "engine directory nowhere does not exist"),
        (lambda: EngineDrafter("x", drafter="sufix"), "unknown drafter of an engine drafter 'sufix'.*mean 'suffix'"),
        (lambda: EngineDrafter("x", draft_tokenizer="yes"), "draft_tokenizer is 'yes'; allowed: true or false"),
        (lambda: EngineDrafter("x", kv_cache_memory_bytes=0), "kv_cache_memory_bytes is 0; allowed: a number of bytes"),
        (lambda: EngineDrafter("x", drafters="suffix"), "unknown engine drafter option 'drafters'.*mean 'drafter'"),
        (lambda: BenchOptions(max_tokens=0), "max_tokens is 0; allowed: an integer of at least 1"),
        (lambda: RequestsBenchOptions(temperature=-1.0), "temperature is -1.0; allowed: 0"),
        (lambda: make_drafter(None, {"num_speculative_tokens": 3}), "without a drafter"),
        (lambda: make_drafter("medusa", {}), "drafter is 'medusa'; allowed: medusa:DIR"),
        (lambda: make_drafter("eagle:", {}), "drafter is 'eagle:'; allowed: eagle:DIR"),
        (lambda: make_drafter("medusa:x", {"top_k": 0}), "top_k is 0; it must be a whole number of at least 1"),
        (lambda: make_drafter("eagle:x", {"depth": 1.5}), "depth is 1.5; it must be a whole number"),
        (lambda: make_drafter("eagle:x", {"top_k": 10**9}), "top_k is 1000000000; .* at least 1, at most 64"),
        (lambda: make_drafter("eagle:x", {"dept": 3}), "unknown eagle drafter option 'dept'.*did you mean 'depth'"),
    ],
)
def test_bad_value_is_named(make, message):
    with pytest.raises(QuasarError, match=message):
        make()


def test_numpy_numbers_are_taken_as_pythons():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.uint8(2),
        top_p=np.float64(0.75),
        seed=np.int64(-3),
        max_tokens=np.int8(5),
        stop_token_ids=np.array([1, 4]),
        logit_bias={np.int64(2): np.float32(0.5)},
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=2,
        top_p=0.75,
        seed=-3,
        max_tokens=5,
        stop_token_ids=[1, 4],
        logit_bias={2: 0.5},
    )
    values = [getattr(params, name) for name in ("temperature", "top_k", "top_p", "seed", "max_tokens")]
    assert [type(value) for value in values] == [float, int, float, int, int]
    engine = StubEngine(random_logits(5), 5)
    assert 0 < len(Runner(engine).generate([1], params)[0].outputs[0].token_ids) <= 5


def test_lists_are_stored_once_and_texts_as_keys_are_ids():
    params = SamplingParams(stop="END", stop_token_ids=[3, 3, 1], bad_words=("a", "a"), logit_bias={"7": 1})
    stored = (params.stop, params.stop_token_ids, params.bad_words, params.logit_bias)
    assert stored == (("END",), (3, 1), ("a",), {7: 1.0})
    assert dataclasses.replace(params, seed=1).stop == ("END",)
    assert SamplingParams(stop=None, logit_bias=None) == SamplingParams(stop=[], logit_bias={})
