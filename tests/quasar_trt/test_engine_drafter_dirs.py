"""Engine directories as drafters: exact on real engines, one vocabulary or none, one pool of threads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from stubs import StubEngine, chain_logits, one_hot_logits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quasar_trt.drafters import engine as engine_module
from quasar_trt.drafters.engine import EngineDrafter
from quasar_trt.drafters.through_text import ThroughText
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.tokenizer import load_tokenizer

PROMPTS = ["a", "one two one two", "The quick brown fox. The quick brown", "0123456789" * 3]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TEXT = "the quick brown fox jumps over the lazy dog, and the lazy dog sleeps over the quick brown fox"


def ids_of(runner: Runner, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in runner.generate(PROMPTS, params)]


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_int8_blocks_leave_bf16_ids_as_they_are(engine_dirs, engine, monkeypatch):
    """Every block is made and verified as long as it may be, whatever passes cost; then by their costs."""
    expected = ids_of(Runner.from_dir(engine_dirs["BF16"], drafter=None, engine=engine, threads=1))
    costs = Runner.from_dir(engine_dirs["BF16"], drafter=f"engine:{engine_dirs['INT8']}", engine=engine, threads=1)
    assert ids_of(costs) == expected
    monkeypatch.setattr("quasar_trt.runner.open_step_cost", lambda *_: None)
    for options in ({}, {"drafter": "ngram", "num_speculative_tokens": 3}, {"drafter": "none"}):
        drafter = EngineDrafter(engine_dirs["INT8"], **options)
        runner = Runner.from_dir(engine_dirs["BF16"], drafter=drafter, engine=engine, threads=1)
        assert ids_of(runner) == expected
        assert runner.stats.acceptance_rate > 0.5
        runner.reset_prefix_cache()
        assert drafter._engine.cache_bytes == 0


def test_costs_of_both_engines_are_kept_apart(engine_dirs, monkeypatch):
    opened = []
    monkeypatch.setattr(
        engine_module, "open_step_cost", lambda engine, manifest: opened.append(manifest.recipe.quantized)
    )
    Runner.from_dir(engine_dirs["BF16"], drafter=EngineDrafter(engine_dirs["INT8"]))
    assert opened == [True]


def test_sampled_ids_are_the_same_in_every_run_of_a_seed(engine_dirs, monkeypatch):
    monkeypatch.setattr("quasar_trt.runner.open_step_cost", lambda *_: None)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
    found = []
    for _ in range(2):
        runner = Runner.from_dir(engine_dirs["BF16"], drafter=EngineDrafter(engine_dirs["INT8"]))
        found.append(ids_of(runner, params))
        assert runner.stats.num_accepted_tokens
    assert found[0] == found[1]


def test_both_engines_share_one_pool_of_threads(engine_dirs):
    drafter = EngineDrafter(engine_dirs["INT8"])
    runner = Runner.from_dir(engine_dirs["BF16"], drafter=drafter, engine="cpu", threads=2)
    assert drafter._engine.pool is runner.engine.pool and drafter._engine.threads == 2


def test_a_made_drafter_takes_no_more_options(engine_dirs):
    with pytest.raises(QuasarError, match=r"drafter_options are {'drafter': 'none'}, but the drafter is made already"):
        Runner.from_dir(
            engine_dirs["BF16"], drafter=EngineDrafter(engine_dirs["INT8"]), drafter_options={"drafter": "none"}
        )


def test_a_checkpoint_is_refused_with_the_command_that_builds_it(hf_dir, engine_dirs):
    with pytest.raises(
        QuasarError, match=rf"{hf_dir} is not an engine directory.*quasar-trt build {hf_dir} --output-dir"
    ):
        Runner.from_dir(engine_dirs["BF16"], drafter=f"engine:{hf_dir}")


@pytest.fixture
def swapped(engine_dirs, tmp_path) -> Path:
    """The INT8 engine with a tokenizer in which two ids have changed places."""
    directory = shutil.copytree(engine_dirs["INT8"], tmp_path / "swapped")
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(values))
    return directory


def test_another_vocabulary_is_refused_with_the_first_id_that_differs(swapped, engine_dirs):
    first = min(load_tokenizer(engine_dirs["BF16"]).convert_tokens_to_ids(["a", "b"]))
    with pytest.raises(QuasarError, match=rf"token id {first} is 'a' in the verifier's vocabulary and 'b' in that of"):
        Runner.from_dir(engine_dirs["BF16"], drafter=EngineDrafter(swapped))


def test_another_vocabulary_drafts_through_text_where_that_is_asked_for(swapped, engine_dirs, monkeypatch):
    monkeypatch.setattr("quasar_trt.runner.open_step_cost", lambda *_: None)
    expected = ids_of(Runner.from_dir(engine_dirs["BF16"], drafter=None))
    runner = Runner.from_dir(engine_dirs["BF16"], drafter=EngineDrafter(swapped, draft_tokenizer=True))
    assert ids_of(runner) == expected
    assert runner.stats.num_draft_tokens


def test_the_same_tokens_in_another_file_are_one_vocabulary(engine_dirs, tmp_path):
    directory = shutil.copytree(engine_dirs["INT8"], tmp_path / "same")
    values = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(values, indent=3))
    Runner.from_dir(engine_dirs["BF16"], drafter=EngineDrafter(directory))


# --- through text


@pytest.fixture(scope="module")
def tokenizers(engine_dirs) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """One of bytes, and one of words and parts of them."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    words.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    return load_tokenizer(engine_dirs["BF16"]), fast


@pytest.mark.parametrize("text", [TEXT, "naïve café 日本", "x"])
def test_text_goes_to_the_drafting_engine_and_back(tokenizers, text):
    bytes_, words = tokenizers
    for verifier, drafting in ((bytes_, words), (words, bytes_)):
        through = ThroughText(verifier, drafting)
        ours, theirs = verifier(text)["input_ids"], drafting(text)["input_ids"]
        assert through.ids(ours) == theirs
        for count in range(1, len(theirs)):
            # As much of the text as is whole, in the verifier's ids.
            read, written = theirs[:count], theirs[count:]
            before = drafting.decode(read)
            if "\ufffd" in before:
                continue
            context = verifier(before)["input_ids"]
            found = through.continuation(context, read, written)
            assert verifier.decode([*context, *found]) == text


def test_half_a_character_is_not_drafted(tokenizers):
    bytes_, words = tokenizers
    ids = bytes_("né")["input_ids"]
    assert ThroughText(words, bytes_).continuation(words("n")["input_ids"], ids[:1], ids[1:2]) == []


def test_ids_that_never_become_text_have_an_end(tokenizers, engine_dirs, monkeypatch):
    """The drafting engine writes first halves of characters only: at most four for each id that is wanted."""
    bytes_, words = tokenizers
    half = bytes_("é")["input_ids"][0]
    drafting = StubEngine(lambda prefix: one_hot_logits(half, 257), 257)
    monkeypatch.setattr(engine_module, "open_engine", lambda *_, **options: drafting)
    drafter = EngineDrafter(engine_dirs["INT8"], draft_tokenizer=True, drafter="none")
    verifier = StubEngine(lambda prefix: one_hot_logits(1, 320), 320)
    runner = Runner(verifier, tokenizer=words, drafter=drafter, max_draft_len=2)
    runner.generate([words("x")["input_ids"]], SamplingParams(temperature=0, max_tokens=4))
    assert [len(step.drafts[0]) for step in verifier.passes] == [0] * 4
    assert 0 < len(drafting.passes) <= 4 * (2 + 2 + 1)


def test_text_without_tokenizers_is_refused(tokenizers):
    with pytest.raises(QuasarError, match="draft_tokenizer is true, but the verifier or the drafting engine has no"):
        ThroughText(tokenizers[0], None)


def test_a_text_that_both_know_is_drafted_to_the_last_byte(tokenizers, engine_dirs, tmp_path, monkeypatch):
    """The verifier emits bytes, the drafting engine the same text in words: it needs a fraction of the passes."""
    bytes_, words = tokenizers
    directory = shutil.copytree(engine_dirs["INT8"], tmp_path / "words")
    words.save_pretrained(directory)
    prompt, rest = bytes_(TEXT[:9])["input_ids"], bytes_(TEXT[9:])["input_ids"]

    def logits(prefix):
        """The next word, however the text before it was cut."""
        following = words(TEXT[len(words.decode(prefix)) :])["input_ids"]
        return one_hot_logits(following[0] if following else 0, 320)

    drafting = StubEngine(logits, 320)
    monkeypatch.setattr(engine_module, "open_engine", lambda *_, **options: drafting)
    verifier = StubEngine(chain_logits(rest, len(prompt), 257), 257)
    drafter = EngineDrafter(directory, draft_tokenizer=True, drafter="none")
    runner = Runner(verifier, tokenizer=bytes_, drafter=drafter, max_draft_len=12)
    (output,) = runner.generate([prompt], SamplingParams(temperature=0, max_tokens=len(rest)))
    assert output.outputs[0].token_ids == rest
    assert len(verifier.passes) < len(rest) / 10 and runner.stats.acceptance_rate > 0.9
    assert drafting.caches == {}
