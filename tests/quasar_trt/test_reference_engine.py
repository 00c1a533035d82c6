"""The reference engine against transformers, and the engine interface's promises: rollback, forks, clear refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from implementations import triton_operations
from tiny import LLAMA3, MODELS, checkpoint_tensors, random_ids, tiny_checkpoint, tiny_model, write_engine_dir

from quasar_trt import plugins
from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel, operations_for
from quasar_trt.errors import QuasarError
from quasar_trt.plugins import reference
from quasar_trt.recipe import LM_HEADS, RESCORED, Recipe

VARIANTS = {architecture: {"architecture": architecture} for architecture in MODELS} | {
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "other rope base": {"rope_theta": 500000.0},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied head": {"tie_word_embeddings": True},
    "hidden is heads times head_dim": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "one kv head": {"num_key_value_heads": 1, "head_dim": 6},
    "yarn rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "Qwen2, tied head": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True},
    "Qwen3, biases": {"architecture": "Qwen3ForCausalLM", "attention_bias": True, "head_dim": 6},
}


class Collector:
    """An `accept` that keeps the first `accepted[index]` draft tokens (all of them by default) and copies the logits."""

    def __init__(self, accepted=None):
        self.accepted = accepted
        self.logits = {}

    def __call__(self, index, logits):
        self.logits[index] = np.array(logits)
        return Acceptance((), len(logits) - 1 if self.accepted is None else self.accepted[index])


def engine_for(recipe=None, *, seed=0, max_seq_len=128, max_rows=64, kv_dtype=torch.float32, **overrides):
    model = ReferenceModel(*tiny_checkpoint(seed, recipe, **overrides))
    return ReferenceEngine(model, max_seq_len=max_seq_len, max_rows=max_rows, kv_dtype=kv_dtype)


def run(engine, sequence, tokens, draft=(), accepted=None):
    """Logits [1 + draft tokens, vocab] of one sequence's step."""
    collector = Collector(None if accepted is None else [accepted])
    engine.step([SequenceStep(sequence, tokens, Draft(tuple(draft)))], collector)
    return collector.logits[0]


def prefill(engine, ids):
    sequence = engine.open()
    return sequence, run(engine, sequence, ids)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers_at_prefill_decode_and_verify(overrides):
    source = tiny_model(**{"architecture": "LlamaForCausalLM", "seed": 5} | overrides)
    config, tensors = checkpoint_tensors(source)
    ids = random_ids(config, 90)
    with torch.no_grad():
        expected = source(torch.tensor([ids])).logits[0].numpy()
    assert expected.std() > 1
    engine = engine_for(seed=5, **overrides)
    sequence, logits = prefill(engine, ids[:60])
    np.testing.assert_allclose(logits, expected[59:60], atol=1e-4)
    for position in range(60, 63):
        np.testing.assert_allclose(run(engine, sequence, [ids[position]]), expected[position : position + 1], atol=1e-4)
    np.testing.assert_allclose(run(engine, sequence, ids[63:66], ids[66:90]), expected[65:90], atol=1e-4)
    np.testing.assert_allclose(ReferenceModel(config, Recipe("none"), tensors)(ids).numpy(), expected, atol=1e-4)


def test_float32_tensors_give_the_same_logits_as_bfloat16_ones():
    config, recipe, tensors = tiny_checkpoint(1)
    ids = random_ids(config, 20)
    widened = {name: tensor.float() for name, tensor in tensors.items()}
    assert torch.equal(ReferenceModel(config, recipe, tensors)(ids), ReferenceModel(config, recipe, widened)(ids))


def test_a_prompt_in_chunks_gives_the_logits_of_one_pass():
    engine = engine_for()
    ids = random_ids(engine.config, 50)
    _, whole = prefill(engine, ids)
    sequence = engine.open()
    for start, end in ((0, 1), (1, 20), (20, 43)):
        silent = SequenceStep(sequence, ids[start:end], needs_logits=False)
        assert engine.step([silent], pytest.fail) == [None]
        assert engine.length(sequence) == end
    np.testing.assert_allclose(run(engine, sequence, ids[43:]), whole, atol=1e-5)


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_after_rollback_the_next_step_equals_a_fresh_prefill(accepted):
    engine = engine_for(Recipe("int8"), kv_dtype=torch.bfloat16)
    ids = random_ids(engine.config, 30)
    draft, recovered = random_ids(engine.config, 5, seed=1), 7
    sequence, _ = prefill(engine, ids[:-1])
    run(engine, sequence, ids[-1:], draft, accepted)
    assert engine.length(sequence) == 30 + accepted
    _, fresh = prefill(engine, [*ids, *draft[:accepted], recovered])
    np.testing.assert_allclose(run(engine, sequence, [recovered]), fresh, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("none"),
        Recipe("int8"),
        Recipe("int8", rotate=False, lm_head="int8"),
        Recipe("int8", activations=16, exclude=("*.1.*",)),
        Recipe("int8", static_activations=True, lm_head="bf16"),
    ],
    ids=str,
)
def test_logits_do_not_depend_on_later_drafts_or_neighbours(recipe):
    engine = engine_for(recipe)
    first, second = random_ids(engine.config, 20), random_ids(engine.config, 33, seed=1)
    alone, _ = prefill(engine, first[:-1])
    expected = run(engine, alone, first[-1:], [3, 4])[:2]
    crowded, _ = prefill(engine, first[:-1])
    neighbour, _ = prefill(engine, second[:-1])
    collector = Collector()
    steps = [
        SequenceStep(neighbour, second[-1:], Draft((9, 9, 9))),
        SequenceStep(crowded, first[-1:], Draft((3, 130))),
        SequenceStep(engine.open(), second),
    ]
    engine.step(steps, collector)
    # 16-bit codes are so close together that float rounding moves some of them by one
    np.testing.assert_allclose(collector.logits[1][:2], expected, atol=1e-5 if recipe.activations != 16 else 1e-3)


def test_ragged_acceptance_keeps_each_sequence_its_own():
    engine = engine_for()
    prompts = [random_ids(engine.config, n, seed=n) for n in (1, 5, 9)]
    drafts = [(), (1, 2, 3), (4, 5, 6, 7, 8)]
    accepted = [0, 2, 5]
    steps = [SequenceStep(engine.open(), p, Draft(d)) for p, d in zip(prompts, drafts, strict=True)]
    acceptances = engine.step(steps, Collector(accepted))
    assert [acceptance.num_accepted_tokens for acceptance in acceptances] == accepted
    for step, prompt, draft, kept in zip(steps, prompts, drafts, accepted, strict=True):
        assert engine.length(step.sequence) == len(prompt) + kept
        _, fresh = prefill(engine, [*prompt, *draft[:kept], 11])
        np.testing.assert_allclose(run(engine, step.sequence, [11]), fresh, atol=1e-5)


def test_a_fork_goes_its_own_way():
    engine = engine_for()
    ids = random_ids(engine.config, 12)
    sequence, _ = prefill(engine, ids)
    copy = engine.fork(sequence)
    run(engine, copy, [1, 2, 3])
    assert (engine.length(sequence), engine.length(copy)) == (12, 15)
    engine.truncate(sequence, 4)
    _, fresh = prefill(engine, [*ids, 1, 2, 3, 5])
    np.testing.assert_allclose(run(engine, copy, [5]), fresh, atol=1e-5)
    _, fresh = prefill(engine, [*ids[:4], 6])
    np.testing.assert_allclose(run(engine, sequence, [6]), fresh, atol=1e-5)


def test_close_frees_one_sequence_and_handles_are_never_reused():
    engine = engine_for()
    first, second = engine.open(), engine.open()
    run(engine, second, [1])
    engine.close(first)
    assert engine.length(second) == 1
    assert engine.open() not in {first, second}
    for use in (
        engine.close,
        engine.fork,
        engine.length,
        lambda s: engine.truncate(s, 0),
        lambda s: run(engine, s, [1]),
    ):
        with pytest.raises(ValueError, match=f"sequence {first} is not open"):
            use(first)


BAD_STEPS = {
    "too many rows": ([0, 1], Draft(tuple(range(63))), "66 rows; this engine allows 64"),
    "no committed token": ([], Draft((1,)), "no committed token"),
    "a child before its parent": ([1], Draft((2, 3), parents=(1, -1)), "no tree of 2 tokens"),
    "too long a sequence": (list(range(60)), Draft((1, 2, 3)), "would hold 68 tokens; allowed: 67"),
    "an id beyond the vocabulary": ([1], Draft((131,)), "token id 131 is outside the vocabulary of 131"),
    "a negative id": ([-1], Draft(), "token id -1"),
}


@pytest.mark.parametrize(("tokens", "draft", "message"), BAD_STEPS.values(), ids=BAD_STEPS.keys())
def test_a_pass_that_cannot_run_is_refused_before_anything_changes(tokens, draft, message):
    engine = engine_for(max_seq_len=67)
    (innocent, _), (sequence, _) = prefill(engine, [1, 2]), prefill(engine, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match=message):
        engine.step([SequenceStep(innocent, [7]), SequenceStep(sequence, tokens, draft)], pytest.fail)
    assert (engine.length(innocent), engine.length(sequence)) == (2, 5)


def test_one_sequence_twice_or_a_draft_without_logits_is_refused():
    engine = engine_for()
    sequence = engine.open()
    with pytest.raises(ValueError, match="appears twice"):
        engine.step([SequenceStep(sequence, [1]), SequenceStep(sequence, [2])], pytest.fail)
    with pytest.raises(ValueError, match="needs no logits"):
        engine.step([SequenceStep(sequence, [1], Draft((2,)), needs_logits=False)], pytest.fail)
    assert engine.length(sequence) == 0


def test_parents_that_spell_a_chain_are_a_chain():
    engine = engine_for()
    collector = Collector()
    engine.step([SequenceStep(engine.open(), [1], Draft((2, 3), parents=(-1, 0)))], collector)
    np.testing.assert_array_equal(collector.logits[0], run(engine, engine.open(), [1], [2, 3]))


@pytest.mark.parametrize("accept", [lambda index, logits: 1 / 0, lambda index, logits: Acceptance((), 3)])
def test_a_failing_accept_leaves_every_cache_as_it_was(accept):
    engine = engine_for()
    sequence, _ = prefill(engine, [1, 2, 3])
    with pytest.raises((ZeroDivisionError, ValueError)):
        engine.step([SequenceStep(sequence, [4], Draft((5, 6)))], accept)
    assert engine.length(sequence) == 3


def test_truncate_refuses_more_than_is_cached():
    engine = engine_for()
    sequence, _ = prefill(engine, [1, 2, 3])
    for length in (4, -1):
        with pytest.raises(ValueError, match="it holds 3"):
            engine.truncate(sequence, length)
    assert engine.length(sequence) == 3


def test_an_empty_pass_does_nothing():
    assert engine_for().step([], pytest.fail) == []


def test_every_linear_is_observed_once_with_its_float_input():
    config, recipe, tensors = tiny_checkpoint(2, Recipe("int8"))
    seen = {}
    ReferenceModel(config, recipe, tensors, observe=lambda name, x: seen.setdefault(name, []).append(x))([1, 2, 3])
    names = ["attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"]
    assert list(seen) == [f"transformer.layers.{i}.{name}" for i in range(3) for name in names]
    assert all(len(inputs) == 1 and inputs[0].dtype == torch.float32 for inputs in seen.values())
    assert [seen[f"transformer.layers.1.{name}"][0].shape for name in names] == [(3, n) for n in (48, 96, 48, 48, 80)]


def divergence(recipe):
    """(mean KL divergence from the source model, share of equal top tokens) of the tiny model under `recipe`."""
    source = ReferenceModel(*tiny_checkpoint(3, attention_bias=True))
    model = ReferenceModel(*tiny_checkpoint(3, recipe, attention_bias=True))
    ids = random_ids(source.config, 200)
    p, q = source(ids).double().log_softmax(-1), model(ids).double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item(), (p.argmax(-1) == q.argmax(-1)).double().mean().item()


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("int8", rotate=False),
        Recipe("int8"),
        Recipe("int8", lm_head="int8"),
        Recipe("int8", lm_head="rescored"),
        Recipe("int8", activations=16),
        Recipe("int8", exclude=("*.1.attention.*", "*.2.mlp.proj")),
        Recipe("int8", static_activations=True),
    ],
    ids=str,
)
def test_the_int8_model_stays_close_to_its_source(recipe):
    kl, agreement = divergence(recipe)
    assert 1e-4 < kl < 0.02  # quantized for real, and little lost
    assert agreement > 0.85


def test_a_rescored_head_has_the_best_logits_of_the_bf16_head_and_the_others_of_the_int8_head():
    ids, logits = random_ids(tiny_checkpoint(3)[0], 20), {}
    for head in LM_HEADS:
        logits[head] = ReferenceModel(*tiny_checkpoint(3, Recipe("int8", lm_head=head)))(ids)
    best = logits["int8"].topk(RESCORED).indices
    assert not torch.equal(logits["int8"], logits["bf16"])
    expected = logits["int8"].scatter(1, best, logits["bf16"].gather(1, best))
    torch.testing.assert_close(logits["rescored"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rotate", [False, True])
def test_sixteen_bit_activations_and_excluded_linears_each_lose_less(rotate):
    lost = divergence(Recipe("int8", rotate=rotate))[0]
    assert divergence(Recipe("int8", rotate=rotate, activations=16))[0] < 0.7 * lost
    assert divergence(Recipe("int8", rotate=rotate, exclude=("*.mlp.*",)))[0] < 0.9 * lost


def test_a_recipe_that_excludes_every_linear_is_the_source():
    assert divergence(Recipe("int8", exclude=("*",), lm_head="bf16")) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["attention.qkv.per_channel_scale", "attention.dense.smoother", "mlp.proj.smoother"])
def test_every_quantization_tensor_acts(name):
    config, recipe, tensors = tiny_checkpoint(3, Recipe("int8"))
    name = f"transformer.layers.1.{name}"
    changed = tensors | {name: tensors[name].clone()}
    changed[name][0, ::2] *= 3
    ids = random_ids(config, 8)
    difference = ReferenceModel(config, recipe, tensors)(ids) - ReferenceModel(config, recipe, changed)(ids)
    assert difference.abs().max() > 0.1


def test_the_kv_cache_is_rounded_to_its_dtype():
    exact, rounded = engine_for(), engine_for(kv_dtype=torch.bfloat16)
    ids = random_ids(exact.config, 40)
    difference = np.abs(prefill(exact, ids)[1] - prefill(rounded, ids)[1]).max()
    assert 1e-5 < difference < 0.2


def test_weight_bytes_count_linears_and_head_in_their_stored_size():
    linears = 3 * (48 * (6 + 4) * 16 + 96 * 48 + 3 * 48 * 80)
    head = 131 * 48
    assert engine_for().weight_bytes_per_step == 2 * (linears + head)
    assert engine_for(Recipe("int8")).weight_bytes_per_step == linears + 2 * head
    assert engine_for(Recipe("int8", lm_head="int8")).weight_bytes_per_step == linears + head


@pytest.mark.parametrize("recipe", [Recipe("none"), Recipe("int8", lm_head="int8")], ids=str)
def test_an_engine_directory_gives_the_logits_of_its_tensors(tmp_path, recipe):
    config, recipe, tensors = tiny_checkpoint(4, recipe)
    directory = write_engine_dir(tmp_path / "engine", config, recipe, tensors, max_seq_len=77)
    engine = ReferenceEngine.from_dir(directory, kv_dtype=torch.float32)
    assert engine.max_seq_len == 77
    assert engine.config == config
    ids = random_ids(config, 10)
    expected = ReferenceModel(config, recipe, tensors)(ids)[-1:].numpy()
    np.testing.assert_allclose(prefill(engine, ids)[1], expected, atol=1e-5)


def test_a_directory_that_is_no_engine_is_refused(tmp_path):
    with pytest.raises(QuasarError, match="not an engine directory"):
        ReferenceEngine.from_dir(tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [Recipe(smoothquant=0.5, rotate=False), Recipe(rotate=True, lm_head="int8"), Recipe(rotate=True, activations=16)],
    ids=["smoothed", "rotated, INT8 head", "16 bits"],
)
def test_with_the_triton_operations_logits_stay_the_same(recipe):
    """Up to the code that a sum in another order may move by one, in a Hadamard transform."""
    config, recipe, tensors = tiny_checkpoint(recipe=recipe, num_hidden_layers=1, attention_bias=True)
    ids = random_ids(config, 5)
    expected = ReferenceModel(config, recipe, tensors)(ids)
    found = ReferenceModel(config, recipe, tensors, operations=triton_operations())(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if recipe.rotate else 1e-5)


def test_operations_are_those_of_the_device(monkeypatch):
    assert operations_for(torch.device("cpu")) is reference
    assert operations_for(torch.device("cuda", 1)).__name__ == "quasar_trt.plugins.triton"
    monkeypatch.setitem(sys.modules, "quasar_trt.plugins.triton", None)
    monkeypatch.delattr(plugins, "triton")
    with pytest.raises(QuasarError, match=r"device is cuda; its operations need Triton: .*quasar-trt\[triton\]"):
        operations_for(torch.device("cuda"))
