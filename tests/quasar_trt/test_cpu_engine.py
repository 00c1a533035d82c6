"""The native engine: equal to the reference engine within rounding, and equal to itself bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cpu_engines import RECIPES, SIZES, prefill, rows_of
from tiny import MODELS, checkpoint_tensors, random_ids, tiny_model

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.plugins import native
from quasar_trt.recipe import Recipe


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_agree_with_the_reference_engine_at_prefill_verify_and_decode(packed, recipe, sizes, isa):
    config, chosen, tensors, path = packed(recipe, sizes)
    cpu = CpuEngine(path, max_seq_len=200, threads=2, isa=isa)
    reference = ReferenceEngine(ReferenceModel(config, chosen, tensors), max_seq_len=200)
    ids = random_ids(config, 90)
    for engine in (cpu, reference):
        engine.open()
    for tokens, draft in [(ids[:80], ids[80:85]), (ids[85:86], ids[86:89]), (ids[89:], [])]:
        batch = [SequenceStep(0, tokens, Draft(tuple(draft)))]
        ours, theirs = rows_of(cpu, batch)[0], rows_of(reference, batch)[0]
        assert theirs.std() > 1
        # a sum in another order may move a BF16 value of the cache by one step, or a code of 8 bits, and with it later ones
        worst, mean = (0.12, 0.02) if chosen.activations == 8 else (0.02, 0.002)
        assert np.abs(ours - theirs).max() < worst * theirs.std()
        assert np.abs(ours - theirs).mean() < mean * theirs.std()


@pytest.mark.parametrize("architecture", MODELS)
def test_bf16_logits_agree_with_transformers(architecture, tmp_path):
    source = tiny_model(architecture, 3)
    config, tensors = checkpoint_tensors(source)
    path = tmp_path / "rank0.engine"
    compile_cpu(config, Recipe("none"), tensors, path)
    ids = random_ids(config, 60)
    with torch.no_grad():
        expected = source(torch.tensor([ids])).logits[0].numpy()
    engine = CpuEngine(path, max_seq_len=64)
    rows = rows_of(engine, [SequenceStep(engine.open(), ids[:1], Draft(tuple(ids[1:])))])[0]
    # float32 throughout, but for the keys and values, which the cache rounds to BF16
    assert np.abs(rows - expected).mean() < 1e-2
    assert np.abs(rows - expected).max() < 0.1


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        *((recipe, "odd head") for recipe in RECIPES),
        ("bf16", "head norms"),
        ("int8", "odd head norms"),
        ("int8", "wide blocks"),
        ("mixed", "plain"),
        ("16-bit activations", "narrow blocks"),
    ],
)
def test_rows_have_the_same_bits_for_any_chunks_threads_neighbours_and_row_counts(packed, recipe, sizes):
    config, _, _, path = packed(recipe, sizes)
    ids = random_ids(config, 170, seed=5)
    alone = CpuEngine(path, max_seq_len=200, threads=1)
    sequence = alone.open()
    expected = [rows_of(alone, [SequenceStep(sequence, [token])])[0][0] for token in ids]
    for threads in (1, 2, 3):
        engine = CpuEngine(path, max_seq_len=200, threads=threads)
        for chunk in (1, 3, 7, 64, 65, 150):
            sequence, last = prefill(engine, ids[:150], chunk)
            np.testing.assert_array_equal(last, expected[149])
            neighbours = [prefill(engine, random_ids(config, 5 * n + 1, seed=n))[0] for n in range(3)]
            rest = [
                SequenceStep(n, random_ids(config, i + 1, seed=i), Draft((1, 2, 3)[:i]))
                for i, n in enumerate(neighbours)
            ]
            at = 150
            for count in (1, 2, 3, 5, 8):  # verify rows
                batch = [
                    *rest[:2],
                    SequenceStep(sequence, ids[at : at + 1], Draft(tuple(ids[at + 1 : at + count]))),
                    rest[2],
                ]
                np.testing.assert_array_equal(rows_of(engine, batch)[2], expected[at : at + count])
                at += count
            for handle in (sequence, *neighbours):
                engine.close(handle)


@pytest.mark.parametrize("recipe", RECIPES)
def test_up_to_sixteen_verify_rows_have_the_bits_of_single_rows(packed, recipe):
    config, _, _, path = packed(recipe)
    engine = CpuEngine(path, max_seq_len=200, threads=2)
    ids = random_ids(config, 60, seed=9)
    sequence, _ = prefill(engine, ids[:40])
    single = engine.fork(sequence)
    expected = [rows_of(engine, [SequenceStep(single, [token])])[0][0] for token in ids[40:57]]
    for drafts in range(16):
        batch = [SequenceStep(sequence, ids[40:41], Draft(tuple(ids[41 : 41 + drafts])))]
        np.testing.assert_array_equal(rows_of(engine, batch, keep=0)[0], expected[: 1 + drafts])
        engine.truncate(sequence, 40)


@pytest.mark.parametrize("recipe", RECIPES)
def test_later_drafts_do_not_change_earlier_rows(packed, recipe):
    config, _, _, path = packed(recipe)
    engine = CpuEngine(path, max_seq_len=64)
    a, b = (prefill(engine, random_ids(config, 20))[0] for _ in range(2))
    first = rows_of(engine, [SequenceStep(a, [7], Draft((8, 9)))])[0]
    second = rows_of(engine, [SequenceStep(b, [7], Draft((8, 100)))])[0]
    np.testing.assert_array_equal(first[:2], second[:2])
    assert (first[2] != second[2]).any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kept", [0, 2, 5])
@pytest.mark.parametrize("prompt", [20, 62])  # within a page of the cache, and across its border
def test_after_a_rollback_logits_are_those_of_a_fresh_prefill(packed, recipe, kept, prompt):
    config, _, _, path = packed(recipe)
    engine = CpuEngine(path, max_seq_len=128)
    ids = random_ids(config, prompt)
    sequence, _ = prefill(engine, ids)
    drafts = (3, 1, 4, 1, 5)
    rows_of(engine, [SequenceStep(sequence, [2], Draft(drafts))], keep=kept)
    assert engine.length(sequence) == prompt + 1 + kept
    after = rows_of(engine, [SequenceStep(sequence, [6])])[0][0]
    _, fresh = prefill(engine, [*ids, 2, *drafts[:kept], 6])
    np.testing.assert_array_equal(after, fresh)


def test_a_fork_shares_the_past_and_not_the_future(packed):
    config, _, _, path = packed("int8")
    engine = CpuEngine(path, max_seq_len=200)
    ids = random_ids(config, 70)
    parent, _ = prefill(engine, ids)
    held = engine.cache_bytes
    child = engine.fork(parent)
    assert engine.cache_bytes == held
    ours = rows_of(engine, [SequenceStep(parent, [1, 2])])[0][0]
    theirs = rows_of(engine, [SequenceStep(child, [3, 2])])[0][0]
    np.testing.assert_array_equal(ours, prefill(engine, [*ids, 1, 2])[1])
    np.testing.assert_array_equal(theirs, prefill(engine, [*ids, 3, 2])[1])


@pytest.mark.parametrize("failure", [KeyboardInterrupt, 3, -1])
def test_when_accept_fails_every_sequence_is_as_it_was(packed, failure):
    config, _, _, path = packed("int8")
    engine = CpuEngine(path, max_seq_len=64)
    sequences = [prefill(engine, random_ids(config, n))[0] for n in (5, 9)]

    def accept(index, logits):
        if index == 0:
            return Acceptance((0,), 1)
        if isinstance(failure, int):
            return Acceptance((0,), failure)  # more than there are, or less than none
        raise failure

    with pytest.raises(ValueError if isinstance(failure, int) else failure):
        engine.step([SequenceStep(s, [1], Draft((2, 3))) for s in sequences], accept)
    assert [engine.length(s) for s in sequences] == [5, 9]
    after = rows_of(engine, [SequenceStep(sequences[0], [4])])[0][0]
    np.testing.assert_array_equal(after, prefill(engine, [*random_ids(config, 5), 4])[1])


@pytest.mark.parametrize("sizes", ["odd head", "odd head norms"])  # sizes that are padded inside the engine
@pytest.mark.parametrize("recipe", ["bf16", "int8", "int8 with rescored head", "mixed, 16-bit activations"])
def test_a_nan_stays_in_its_sequence_and_does_not_outlive_it(packed, recipe, sizes, tmp_path):
    config, chosen, tensors, _ = packed(recipe, sizes)
    tensors = dict(tensors)
    embedding = tensors["transformer.vocab_embedding.weight"].clone()
    embedding[7, 3] = float("nan")
    tensors["transformer.vocab_embedding.weight"] = embedding
    compile_cpu(config, chosen, tensors, tmp_path / "rank0.engine")
    engine = CpuEngine(tmp_path / "rank0.engine", max_seq_len=64)
    sick, sound = engine.open(), engine.open()
    rows = rows_of(engine, [SequenceStep(sick, [1, 7]), SequenceStep(sound, [1, 2])])
    assert np.isnan(rows[0]).all()
    _, alone = prefill(engine, [1, 2])
    np.testing.assert_array_equal(rows[1][0], alone)
    assert np.isfinite(alone).all()


@pytest.mark.parametrize("isa", native.isa_names())
def test_a_nan_score_makes_the_row_nan(packed, isa, tmp_path):
    config, chosen, tensors, _ = packed("bf16")
    tensors = dict(tensors)
    qkv = tensors["transformer.layers.0.attention.qkv.weight"].clone()
    qkv[0, 0] = float("nan")  # of a query: the scores of one head
    tensors["transformer.layers.0.attention.qkv.weight"] = qkv
    compile_cpu(config, chosen, tensors, tmp_path / "rank0.engine")
    engine = CpuEngine(tmp_path / "rank0.engine", max_seq_len=64, isa=isa)
    assert np.isnan(prefill(engine, [1, 2, 3])[1]).all()


def test_logits_that_a_caller_keeps_are_read_only_and_stay_valid(packed):
    _, _, _, path = packed("bf16")
    engine = CpuEngine(path, max_seq_len=64)
    kept = []

    def accept(index, logits):
        kept.append(logits)
        return Acceptance((0,), logits.shape[0] - 1)

    engine.step([SequenceStep(engine.open(), [1])], accept)
    first = kept[0].copy()
    engine.step([SequenceStep(engine.open(), [1], Draft((2,) * 20))], accept)  # needs more room
    np.testing.assert_array_equal(kept[0], first)
    with pytest.raises(ValueError, match="read-only"):
        kept[0][0, 0] = 1.0


def test_a_forked_process_is_told_to_open_the_engine_again(packed):
    _, _, _, path = packed("bf16")
    engine = CpuEngine(path, max_seq_len=64, threads=2)
    child = os.fork()
    if child == 0:  # only raw exits here: pytest must not run twice
        try:
            rows_of(engine, [SequenceStep(engine.open(), [1])])
        except RuntimeError as error:
            os._exit(0 if "open it again" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_too_many_threads_are_refused_in_one_line(packed):
    path = packed("bf16")[3]
    program = f"""
import resource
from pathlib import Path
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.errors import QuasarError
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    CpuEngine(Path({str(path)!r}), max_seq_len=16, threads=3000)
except QuasarError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.startswith("cannot start 3000 threads"), result.stderr


def test_closing_frees_the_cache(packed):
    config, _, _, path = packed("bf16")
    engine = CpuEngine(path, max_seq_len=200)
    parent, _ = prefill(engine, random_ids(config, 130))
    child = engine.fork(parent)
    engine.close(parent)
    assert engine.cache_bytes > 0
    engine.close(child)
    assert engine.cache_bytes == 0
    with pytest.raises(ValueError, match="not open"):
        engine.length(child)


def test_impossible_steps_are_refused_and_change_nothing(packed):
    config, _, _, path = packed("bf16")
    engine = CpuEngine(path, max_seq_len=16, max_rows=8)
    sequence, _ = prefill(engine, random_ids(config, 14), chunk=7)
    for entry, message in [
        (SequenceStep(sequence, [1, 2, 3]), "would hold 17 tokens"),
        (SequenceStep(sequence, [1] * 9), "the pass has 9 rows"),
        (SequenceStep(sequence, [config.vocab_size]), "outside the vocabulary"),
        (SequenceStep(sequence, [-1]), "outside the vocabulary"),
        (SequenceStep(sequence, []), "no committed token"),
        (SequenceStep(sequence, [1], Draft((1,), parents=(0,))), "are no tree of 1 tokens"),
        (SequenceStep(sequence, [1], Draft((1,), parents=(-2,))), "are no tree of 1 tokens"),
        (SequenceStep(sequence, [1], Draft((1,), parents=())), "are no tree of 1 tokens"),
        (SequenceStep(sequence, [1], Draft((1,)), needs_logits=False), "needs no logits"),
        (SequenceStep(sequence, [2**40]), "outside the vocabulary"),
        (SequenceStep(99, [1]), "not open"),
    ]:
        with pytest.raises(ValueError, match=message):
            rows_of(engine, [entry])
        assert engine.length(sequence) == 14
    with pytest.raises(ValueError, match="twice"):
        rows_of(engine, [SequenceStep(sequence, [1]), SequenceStep(sequence, [1])])
    with pytest.raises(ValueError, match="cannot truncate"):
        engine.truncate(sequence, 15)


def test_a_packed_file_of_another_layout_is_refused(packed, tmp_path):
    _, _, _, path = packed("bf16")
    other = tmp_path / "rank0.engine"
    other.write_bytes(path.read_bytes().replace(b'"layout_version":"1"', b'"layout_version":"0"'))
    with pytest.raises(QuasarError, match="packed layout 0"):
        CpuEngine(other, max_seq_len=16)


def test_a_packed_file_of_other_hadamard_blocks_is_refused(packed, tmp_path):
    _, _, _, path = packed("int8")
    other = tmp_path / "rank0.engine"
    written = path.read_bytes()
    assert written.count(rb"\"mlp.proj\": 16") == 1
    other.write_bytes(written.replace(rb"\"mlp.proj\": 16", rb"\"mlp.proj\": 80"))
    with pytest.raises(QuasarError, match=r"hadamard_blocks .*'mlp.proj': 80.*build the engine again"):
        CpuEngine(other, max_seq_len=16)


def test_unknown_instruction_sets_and_thread_counts_are_refused(packed):
    path = packed("bf16")[3]
    with pytest.raises(QuasarError, match="did you mean 'portable'"):
        CpuEngine(path, max_seq_len=16, isa="portble")
    with pytest.raises(QuasarError, match="threads is 0"):
        CpuEngine(path, max_seq_len=16, threads=0)
