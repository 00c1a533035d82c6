"""Hidden states, embedding and head of the engine of plans, and the drafters that read them, by way of the interpreted network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_steps import rows_of
from heads import Watched, eagle_tensors, eagle_values, medusa_tensors, write_eagle, write_medusa
from tiny import random_ids, save_hf, tiny_checkpoint, write_engine_dir
from tiny_plan import double as double_without_states
from tiny_plan import double_of, install, open_double, write_plan_dir

from quasar_trt.builders.build import build
from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.reference import ReferenceEngine
from quasar_trt.engines.source_basis import FILE
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

PLACES = (2, 3, 4, 7)  # of a model of 7 layers
LIMITS = Limits(max_batch_size=3, max_seq_len=48, max_draft_len=7)


@pytest.fixture
def plan(deep_dirs, tmp_path, monkeypatch):
    """weights -> an engine of plans of `deep_dirs`; its double is `engine.trt`."""

    def opened(weights: str, source=None, rtx: bool = True):
        directory = write_plan_dir(source or deep_dirs[weights], tmp_path / f"plan {weights}", limits=LIMITS)
        trt = install(monkeypatch, double_of(directory, rtx, LIMITS))
        engine = open_engine(directory)
        engine.trt = trt
        return engine

    return opened


@torch.no_grad()
def source_states(model, ids) -> np.ndarray:
    """[tokens, kept places, hidden_size] of the source, in float32."""
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[place] for place in PLACES], dim=2)[0].numpy()


@pytest.mark.parametrize("rtx", [True, False])
@pytest.mark.parametrize(("weights", "largest"), [("BF16", 0.01), ("INT8", 0.35)])
def test_states_are_those_of_the_source_model(plan, deep_model, weights, largest, rtx):
    """Of prompts in chunks, ragged drafts and trees; relative errors, as another basis would be at 1.4."""
    engine = plan(weights, rtx=rtx)
    assert engine.capabilities.hidden_states
    engine.keep_hidden_states(PLACES)
    texts = [random_ids(engine.config, count, seed=count) for count in (25, 9)]
    expected = [source_states(deep_model, text) for text in texts]
    sequences = [engine.open(), engine.open()]
    engine.step([SequenceStep(sequences[0], texts[0][:21], needs_logits=False)], None)
    found = [[engine.hidden_states(0, range(21))], []]
    for start, end in ((0, 4), (4, 5)):
        draft = Draft(tuple(texts[1][end : end + 2]))
        rows_of(engine, [SequenceStep(sequences[1], texts[1][start:end], draft)], keep=0)
        found[1].append(engine.hidden_states(0, range(end - start)))
    right, wrong = texts[0][22:25], texts[0][0]
    tree = Draft((wrong, right[0], wrong, right[1], right[2]), (-1, -1, 1, 1, 3))
    batch = [
        SequenceStep(sequences[1], texts[1][5:8], Draft((texts[1][8],))),
        SequenceStep(sequences[0], [texts[0][21]], tree),
    ]
    engine.step(batch, lambda index, logits: Acceptance((0,), *((1, None), (3, (1, 3, 4)))[index]))
    found[0].append(engine.hidden_states(1, [0, 2, 4, 5]))
    found[1].append(engine.hidden_states(0, range(4)))
    turns = [engine.source_basis.to_source(behind_norm=place == 7) for place in PLACES]
    for parts, theirs in zip(found, expected, strict=True):
        ours = np.concatenate(parts)
        if turns[0] is not None:
            ours = np.einsum("tpj,pij->tpi", ours, np.stack(turns))
        assert ours.shape == theirs.shape and ours.dtype == np.float32
        for place in range(len(PLACES)):
            off = np.linalg.norm(ours[:, place] - theirs[:, place], axis=1) / np.linalg.norm(theirs[:, place], axis=1)
            assert off.max() < (2 if weights == "INT8" else 1) * largest and off.mean() < largest


def test_states_are_those_of_the_reference_engine_of_the_same_weights(tmp_path, monkeypatch):
    recipe = Recipe(activations=16, rotate=False, lm_head="bf16")
    source = write_engine_dir(tmp_path / "source", *tiny_checkpoint(recipe=recipe, num_hidden_layers=7))
    directory = write_plan_dir(source, tmp_path / "plan", limits=LIMITS)
    install(monkeypatch, double_of(directory, limits=LIMITS))
    engines = open_engine(directory), ReferenceEngine.from_dir(source, kv_dtype=torch.float32)
    found, ids = [], random_ids(engines[0].config, 14)
    for engine in engines:
        engine.keep_hidden_states((7, 2, 4))
        rows_of(engine, [SequenceStep(engine.open(), ids)])
        found.append(engine.hidden_states(0, [13, 0, 12]))
    np.testing.assert_allclose(*found, atol=5e-3 * np.abs(found[1]).max())


def test_only_what_was_asked_for_comes_to_the_host(plan):
    engine = plan("BF16")
    memory, sequence = engine._session.memory, engine.open()
    rows_of(engine, [SequenceStep(sequence, [1, 2, 3])])
    engine.keep_hidden_states(())
    assert memory._kept == {} and engine.hidden_states(0, [0, 2]).shape == (2, 0, 42)
    engine.keep_hidden_states((4,))
    assert [tuple(host.shape) for host in memory._kept.values()] == [(24, 42)]
    kept = memory._kept
    engine.keep_hidden_states([4])
    assert memory._kept is kept
    rows_of(engine, [SequenceStep(sequence, [4])])
    with pytest.raises(ValueError, match="hidden states of 1 rows, not of rows"):
        engine.hidden_states(0, [0, 1])
    with pytest.raises(ValueError, match="gives no hidden states of place 5; it gives 2, 3, 4, 7"):
        engine.keep_hidden_states((4, 5))
    engine.keep_hidden_states(())
    assert memory._kept == {}


def test_a_shallow_model_gives_the_last_states_alone(engine_dirs, tmp_path, monkeypatch):
    directory = write_plan_dir(engine_dirs["BF16"], tmp_path / "plan")
    install(monkeypatch, double_of(directory))
    engine = open_engine(directory)
    engine.keep_hidden_states((engine.config.num_hidden_layers,))
    with pytest.raises(ValueError, match="no hidden states of place 1; it gives"):
        engine.keep_hidden_states((1,))


def test_without_the_recorded_basis_there_are_no_states(plan, deep_dirs, tmp_path, head_dirs):
    engine = plan("INT8")
    directory = tmp_path / "plan INT8"
    (directory / FILE).unlink()
    engine = open_engine(directory)
    assert not engine.capabilities.hidden_states and engine.capabilities.tree
    with pytest.raises(ValueError, match="keeps no hidden states"):
        engine.keep_hidden_states((7,))
    with pytest.raises(QuasarError, match="drafter 'medusa' reads hidden states, which this engine does not give"):
        Runner(engine, drafter=make_drafter(f"medusa:{head_dirs['medusa']}"))
    assert not open_double(double_without_states(), tmp_path).capabilities.hidden_states


@pytest.mark.parametrize("head", ["bf16", "int8"])
def test_embedding_and_head_are_those_of_the_source(plan, deep_model, deep_dirs, tmp_path, head):
    """The head is on the device from the moment that it is used."""
    save_hf(deep_model, tmp_path / "model")
    recipe = Recipe(lm_head=head)
    build(str(tmp_path / "model"), tmp_path / "source", recipe, progress=False, calib_size=2, calib_max_seq_length=16)
    engine = plan(head, tmp_path / "source")
    ids = random_ids(engine.config, 12)
    with torch.no_grad():
        states = deep_model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected, last = states[0][0].numpy(), states[-1][0].numpy()
    logits = last @ deep_model.lm_head.weight.detach().numpy().T
    turn, for_head = engine.source_basis.to_source(), engine.source_basis.for_head()
    np.testing.assert_allclose(engine.embeddings(ids) @ turn.T, expected, atol=0.01 * expected.std())
    plan_bytes, device = engine.device_bytes, engine.trt.device
    hidden, vocab = engine.config.hidden_size, engine.config.vocab_size
    needed = 2 * vocab * hidden + 4 * vocab * (head == "int8")
    device.free = needed - 1
    with pytest.raises(
        QuasarError, match=r"the drafter needs 0.00 GB on a double beside the plan, 0.00 GB are free; take"
    ):
        engine.head_logits(last @ for_head.T)
    device.free = needed
    engine.head_logits(last @ for_head.T)
    device.free = 0
    found = engine.head_logits(last @ for_head.T)
    assert found.shape == logits.shape and found.dtype == np.float32
    np.testing.assert_allclose(found, logits, atol=0.05 * logits.std())
    assert engine.device_bytes == plan_bytes + needed


@pytest.mark.parametrize("weights", ["BF16", "INT8"])
@pytest.mark.parametrize("drafter", ["medusa", "eagle", "eagle3"])
def test_heads_draft_for_a_plan_and_ids_are_those_of_plain_decoding(plan, tmp_path, weights, drafter):
    """Requests side by side, prompts in chunks, rejected and accepted paths of trees, at both temperatures."""
    engine = plan(weights)
    directory, kind = tmp_path / "head", drafter.rstrip("3")
    if kind == "medusa":
        write_medusa(directory, medusa_tensors(engine.config, 3, 1), 3, 1)
    else:
        third = drafter == "eagle3"
        values = eagle_values(engine.config, **({"draft_vocab_size": 90} if third else {}))
        write_eagle(directory, values, eagle_tensors(engine.config, third, values, embedding=False))
    prompts = [random_ids(engine.config, count, seed=count) for count in (3, 12)]
    for temperature in (0, 0.9):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=14, ignore_eos=True) for seed in (1, 2)]
        plain = Runner(engine, max_draft_len=7).generate(prompts, params)
        answers = {tuple(ids): each.outputs[0].token_ids for ids, each in zip(prompts, plain, strict=True)}
        watched = Watched(make_drafter(f"{kind}:{directory}", {"top_k": 2}), answers)
        runner = Runner(engine, drafter=watched, max_draft_len=7)
        found = runner.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in found] == list(answers.values())
        assert runner.stats.num_accepted_tokens > 4
        proposed = [draft for _, _, draft, states in watched.proposals if len(states)]
        assert len(proposed) > 6 and any(draft.is_tree for draft in proposed)
