"""The native engine where attention runs over several pages of the cache, and in several chunks."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_engines import prefill, rows_of
from tiny import random_ids

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.plugins import native


# Of 600 positions: pages of 64, and chunks of 256 whose softmax is computed apart and, with several threads, elsewhere.
@pytest.mark.parametrize("sizes", ["plain", "odd head", "biases", "wide blocks"])
def test_long_contexts_agree_with_the_reference_engine(packed, sizes):
    config, chosen, tensors, path = packed("bf16", sizes)
    ids = random_ids(config, 600, seed=2)
    cpu = CpuEngine(path, max_seq_len=600, threads=2)
    reference = ReferenceEngine(ReferenceModel(config, chosen, tensors), max_seq_len=600)
    sequences = [prefill(engine, ids[:595], chunk=200)[0] for engine in (cpu, reference)]
    batches = [[SequenceStep(sequence, ids[595:596], Draft(tuple(ids[596:])))] for sequence in sequences]
    ours, theirs = rows_of(cpu, batches[0])[0], rows_of(reference, batches[1])[0]
    assert np.abs(ours - theirs).max() < 0.02 * theirs.std()


@pytest.mark.parametrize("sizes", ["plain", "odd head", "biases", "wide blocks"])
def test_long_contexts_have_the_same_bits_for_any_chunks_threads_row_counts_and_instruction_sets(packed, sizes):
    config, _, _, path = packed("int8", sizes)
    ids = random_ids(config, 530, seed=6)
    alone = CpuEngine(path, max_seq_len=600, threads=1)
    sequence = alone.open()
    expected = [rows_of(alone, [SequenceStep(sequence, [token])])[0][0] for token in ids]
    for isa in native.isa_names():
        for threads, chunk in ((1, 256), (2, 101), (5, 250)):
            engine = CpuEngine(path, max_seq_len=600, threads=threads, isa=isa)
            sequence, last = prefill(engine, ids[:508], chunk)
            np.testing.assert_array_equal(last, expected[507])
            other, _ = prefill(engine, ids[:250])
            rest = SequenceStep(other, ids[250:251], Draft(tuple(ids[251:260])))
            at = 508
            for count in (1, 2, 3, 5, 8):  # the first rows see two chunks, the others three
                batch = [rest, SequenceStep(sequence, ids[at : at + 1], Draft(tuple(ids[at + 1 : at + count])))]
                short, rows = rows_of(engine, batch)
                np.testing.assert_array_equal(rows, expected[at : at + count])
                np.testing.assert_array_equal(short, expected[250:260])
                engine.truncate(other, 250)
                at += count
