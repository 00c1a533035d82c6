"""A runner opened from an engine directory of a tiny random model, on the reference and the native engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny import random_ids, tiny_checkpoint, write_engine_dir

from quasar_trt import step_cost
from quasar_trt.engines.reference import ReferenceEngine
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import measure


@pytest.fixture(scope="module", params=["none", "int8"])
def engine_dir(request, tmp_path_factory):
    recipe = Recipe("none") if request.param == "none" else Recipe()
    return write_engine_dir(tmp_path_factory.mktemp("engine") / request.param, *tiny_checkpoint(recipe=recipe))


def open_runner(directory, **options) -> Runner:
    return Runner.from_dir(directory, engine="reference", **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_ids_equal_plain_ids(engine_dir, temperature):
    plain = open_runner(engine_dir, drafter=None)
    prompts = [random_ids(plain.engine.config, count, seed=count) * 2 for count in (1, 4, 9)]
    params = SamplingParams(temperature=temperature, top_k=4, seed=1, max_tokens=32)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    for num_speculative_tokens in (1, 3, 8):
        runner = open_runner(engine_dir, drafter_options={"num_speculative_tokens": num_speculative_tokens})
        assert [output.outputs[0].token_ids for output in runner.generate(prompts, params)] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("weights", ["INT8", "BF16"])
def test_drafted_ids_equal_plain_ids_on_the_native_engine(engine_dirs, weights, temperature, monkeypatch):
    """Draft lengths 1 to 8, prompts of several lengths together, 1 and 2 threads: bit for bit the same ids."""
    # Drafts are verified whole, whatever they cost.
    monkeypatch.setattr("quasar_trt.runner.open_step_cost", lambda *args: None)
    prompts = ["a", "one two one two", "The quick brown fox. The quick brown", "0123456789" * 3]
    params = SamplingParams(temperature=temperature, top_k=2, seed=3, max_tokens=48)
    plain = Runner.from_dir(engine_dirs[weights], drafter=None, engine="cpu", threads=1)
    expected = [plain.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    num_accepted_tokens = 0
    for num_speculative_tokens in range(1, 9):
        runner = Runner.from_dir(
            engine_dirs[weights],
            drafter="suffix" if num_speculative_tokens % 4 > 1 else "ngram",
            drafter_options={"num_speculative_tokens": num_speculative_tokens},
            engine="cpu",
            threads=1 + num_speculative_tokens % 2,
        )
        assert [output.outputs[0].token_ids for output in runner.generate(prompts, params)] == expected
        num_accepted_tokens += runner.stats.num_accepted_tokens
    assert num_accepted_tokens > 0


def test_costs_of_passes_are_measured_once(engine_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    passes = []
    step = ReferenceEngine.step
    monkeypatch.setattr(ReferenceEngine, "step", lambda *args: passes.append(1) or step(*args))
    monkeypatch.setattr(step_cost, "measure", lambda *args: (measure(*args)[0], True))  # whatever else runs here
    open_runner(engine_dir, drafter=None)
    assert passes and list(tmp_path.glob("quasar-trt/step-cost/*.json"))
    passes.clear()
    open_runner(engine_dir)
    assert not passes


def test_text_streams_as_it_is_generated(engine_dirs):
    runner = Runner.from_dir(engine_dirs["INT8"])
    params = SamplingParams(seed=5, max_tokens=40)
    completion = runner.generate("hello", params)[0].outputs[0]
    pieces = list(runner.stream("hello", params))
    assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
    assert "".join(piece.text for piece in pieces) == completion.text


def test_limits_come_from_the_manifest(engine_dir):
    with pytest.raises(QuasarError, match="num_speculative_tokens is 9; allowed: at most 8"):
        open_runner(engine_dir, drafter_options={"num_speculative_tokens": 9})
    runner = open_runner(engine_dir)
    with pytest.raises(QuasarError, match="has 256 tokens; allowed: at most 255"):
        runner.generate([1] * 256)


@pytest.mark.parametrize(("named", "expected"), [(7, (7,)), ([2, 7], (2, 7)), (None, ())])
def test_end_of_sequence_ids_of_the_generation_config(engine_dir, named, expected):
    path = engine_dir / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": named}))
    try:
        assert open_runner(engine_dir).eos_token_ids == expected
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"eos_token_id": 7', "is no JSON object"),
        (b"\xff\xfe", "is no JSON object"),
        (b"[7]", "is no JSON object"),
        (b'{"eos_token_id": "7"}', "eos_token_id is '7'; allowed: an integer or a list of them"),
        (b'{"eos_token_id": [2, "7"]}', r"eos_token_id is \[2, '7'\]; allowed"),
        (b'{"eos_token_id": true}', "eos_token_id is True; allowed"),
        (b'{"eos_token_id": 7.0}', "eos_token_id is 7.0; allowed"),
    ],
)
def test_damaged_generation_config_is_named(engine_dir, content, message):
    path = engine_dir / "generation_config.json"
    path.write_bytes(content)
    try:
        with pytest.raises(QuasarError, match=f"{path} is damaged: .*{message}.*build the engine again") as caught:
            open_runner(engine_dir)
        assert "\n" not in str(caught.value)
    finally:
        path.unlink()


def test_text_that_utf8_cannot_hold_is_refused(engine_dirs):
    runner = Runner.from_dir(engine_dirs["INT8"])
    with pytest.raises(QuasarError, match=r"has '\\udcff' at character 2; allowed: what UTF-8 can hold"):
        runner.generate("ab\udcff")
    with pytest.raises(QuasarError, match=r"has '\\ud83d' at character \d+; allowed"):
        runner.chat_ids([{"role": "user", "content": "ab\ud83d"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages is 'hello'; allowed: a list of at least one"),
        ([], r"messages is \[\]; allowed"),
        (None, "messages is None; allowed"),
        ({"role": "user", "content": "hi"}, "messages is {.*; allowed"),
        (["hello"], """a message is 'hello'; allowed: {"role": text, "content": text}"""),
        ([{"role": "user"}], "a message is {'role': 'user'}; allowed"),
        ([{"role": "user", "content": "hi"}, {"role": 1, "content": "hi"}], "a message is {.*1.*}; allowed"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "a message is {.*; allowed"),
        (
            [{"role": "frob", "content": "hi"}],
            "messages has role 'frob'; allowed: system, developer, user, assistant, tool$",
        ),
    ],
)
def test_messages_of_another_form_are_refused(engine_dirs, messages, message):
    with pytest.raises(QuasarError, match=message):
        Runner.from_dir(engine_dirs["INT8"]).chat_ids(messages)


# Leaves out messages of any role but three, and spaces around the texts of these.
PICKY = (
    "{% for message in messages %}{% if message.role in ('system', 'user', 'assistant') %}"
    "{{ message.role }}: {{ message.content | trim }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_message_that_the_template_leaves_out_is_refused(engine_dirs, role):
    runner = Runner.from_dir(engine_dirs["INT8"])
    runner.tokenizer.chat_template = PICKY
    messages = [{"role": "system", "content": " a "}, {"role": "user", "content": "b"}]
    assert runner.tokenizer.decode(runner.chat_ids(messages)) == "system: a\nuser: b\n"
    messages.append({"role": role, "content": "c"})
    with pytest.raises(QuasarError, match=f"messages has role '{role}' where this model's chat template leaves it out"):
        runner.chat(messages)
    messages[-1] = {"role": role, "content": ""}  # of which there is nothing to leave out
    assert runner.tokenizer.decode(runner.chat_ids(messages)) == "system: a\nuser: b\n"


def test_text_without_a_tokenizer_is_refused(engine_dir):
    with pytest.raises(QuasarError, match="no tokenizer"):
        open_runner(engine_dir).generate("hello")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "ngrams"}, "did you mean 'ngram'"),
        ({"drafter_options": {"history": 2}}, "unknown suffix drafter option 'history'.*'history_tokens'"),
        ({"engine": "referense"}, "did you mean 'reference'"),
    ],
)
def test_unknown_name_is_refused(engine_dir, options, message):
    with pytest.raises(QuasarError, match=message):
        Runner.from_dir(engine_dir, **options)


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(QuasarError, match="does not exist"):
        Runner.from_dir(tmp_path / "absent")


def test_token_ids_need_no_transformers(engine_dirs):
    """The directory has a tokenizer; it is loaded with the first text that is read."""
    directory = engine_dirs["INT8"]
    assert (directory / "tokenizer.json").is_file()
    program = f"""
import sys
from quasar_trt import Runner, SamplingParams
import quasar_trt.runner
assert "torch" not in sys.modules
runner = Runner.from_dir({str(directory)!r}, engine="reference")
params = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
stream = runner.stream([1, 2, 3], params, detokenize=False)
ids = [token for output in stream for token in output.token_ids]
completion = runner.generate([1, 2, 3], params)[0].outputs[0]
assert len(ids) == 4 and completion.token_ids == ids and "transformers" not in sys.modules
assert completion.text == "".join(output.text for output in runner.stream([1, 2, 3], params))
assert "transformers" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
