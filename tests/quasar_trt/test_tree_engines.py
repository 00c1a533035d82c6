"""A pass over a tree: each row has the bits of its path as a chain, and the cache keeps the accepted path alone."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_engines import RECIPES, prefill, rows_of
from stubs import paths
from tiny import random_ids

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.plugins import native


def random_tree(config, size: int, seed: int, deep: bool = False) -> Draft:
    """Parents anywhere before their children, or mostly directly before them."""
    generator = np.random.default_rng(seed)
    lowest = (lambda index: max(index - 3, -1)) if deep else (lambda index: -1)
    parents = tuple(int(generator.integers(lowest(index), index)) for index in range(size))
    return Draft(tuple(random_ids(config, size, seed=seed)), parents)


def nodes_to(draft: Draft, index: int) -> tuple[int, ...]:
    """Indices from the root to a token of a tree."""
    found = ()
    while index >= 0:
        found, index = (index, *found), draft.parents[index]
    return found


def step(engine, sequence, tokens, draft, index: int | None = None):
    """Logits rows of one pass that keeps the path to the token at `index`, or nothing."""
    kept = () if index is None else nodes_to(draft, index)
    rows = []

    def accept(_, logits):
        rows.append(logits.copy())
        return Acceptance((0,), len(kept), kept)

    engine.step([SequenceStep(sequence, tokens, draft)], accept)
    return rows[0]


def rows_of_chains(engine, prompt, tokens, draft):
    """The rows of a tree, each from a pass over its path as a chain; the committed row first."""
    sequence, _ = prefill(engine, prompt)
    found = []
    for path in ((), *paths(draft)):
        found.append(rows_of(engine, [SequenceStep(sequence, tokens, Draft(path))])[0][-1])
        engine.truncate(sequence, len(prompt))
    return np.stack(found)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        *((recipe, "plain") for recipe in RECIPES),
        ("int8", "odd head"),
        ("bf16", "head norms"),
        ("int8", "narrow blocks"),
    ],
)
def test_rows_have_the_bits_of_their_paths(packed, recipe, sizes):
    """Trees at the beginning, across pages of 64 and across chunks of 256 positions, between neighbours, 1 to 3 threads."""
    config, _, _, path = packed(recipe, sizes)
    alone = CpuEngine(path, max_seq_len=400, threads=1)
    for prompt, size, deep in ((2, 7, False), (60, 12, True), (250, 20, True), (251, 6, False)):
        ids = random_ids(config, prompt, seed=prompt)
        draft = random_tree(config, size, seed=prompt, deep=deep)
        expected = rows_of_chains(alone, ids, [5, 6], draft)
        for threads in (1, 2, 3):
            engine = CpuEngine(path, max_seq_len=400, threads=threads)
            sequence, _ = prefill(engine, ids)
            first, second = (prefill(engine, random_ids(config, 9 + n, seed=n))[0] for n in range(2))
            batch = [
                SequenceStep(first, [1], Draft((2, 3, 4), parents=(-1, -1, 0))),
                SequenceStep(sequence, [5, 6], draft),
                SequenceStep(second, [1], Draft((2, 3))),
            ]
            found = {}

            def accept(index, logits, found=found):
                found[index] = logits.copy()
                return Acceptance((0,), 0)

            engine.step(batch, accept)
            np.testing.assert_array_equal(found[1], expected)


@pytest.mark.parametrize("isa", native.isa_names())
def test_large_trees_have_the_bits_of_their_paths_on_every_instruction_set(packed, isa):
    """300 tokens: more than a chunk of slots, more queries than are computed together, paths across three chunks."""
    config, _, _, path = packed("int8", "biases")
    ids = random_ids(config, 240, seed=4)
    draft = random_tree(config, 300, seed=1, deep=True)
    engine = CpuEngine(path, max_seq_len=700, threads=2, isa=isa, max_rows=400)
    sequence, _ = prefill(engine, ids)
    tree = step(engine, sequence, [7], draft)
    assert engine.length(sequence) == 241
    depths = [len(each) for each in paths(draft)]
    assert 241 + max(depths) > 300
    for index in (0, 1, 17, 150, 299, int(np.argmax(depths))):
        engine.truncate(sequence, 240)
        chain = rows_of(engine, [SequenceStep(sequence, [7], Draft(paths(draft)[index]))])[0]
        nodes = nodes_to(draft, index)
        np.testing.assert_array_equal(tree[[0, *[node + 1 for node in nodes]]], chain)


def test_rows_of_a_tree_have_the_bits_of_plain_decoding(packed):
    config, _, _, path = packed("int8")
    engine = CpuEngine(path, max_seq_len=100, threads=2)
    ids = random_ids(config, 30)
    sequence, _ = prefill(engine, ids)
    draft = random_tree(config, 9, seed=3)
    tree = step(engine, sequence, [8], draft)
    for index in range(9):
        plain, _ = prefill(engine, [*ids, 8])
        for token in paths(draft)[index]:
            last = rows_of(engine, [SequenceStep(plain, [token])])[0][0]
        np.testing.assert_array_equal(tree[1 + index], last)


def test_parents_that_spell_a_chain_are_a_chain(packed):
    config, _, _, path = packed("int8")
    engine = CpuEngine(path, max_seq_len=100)
    ids = random_ids(config, 30)
    rows = []
    for parents in (None, (-1, 0, 1)):
        sequence, _ = prefill(engine, ids)
        rows.append(rows_of(engine, [SequenceStep(sequence, [1], Draft((2, 3, 4), parents))], keep=2)[0])
        assert engine.length(sequence) == 33
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("prompt", [20, 60, 251])  # within a page, across a border of pages, and of chunks
def test_after_a_path_was_kept_the_cache_goes_on_as_in_plain_decoding(packed, recipe, prompt):
    config, _, _, path = packed(recipe)
    engine = CpuEngine(path, max_seq_len=400, threads=2)
    ids = random_ids(config, prompt)
    draft = random_tree(config, 12, seed=prompt, deep=True)
    for index in (None, 3, 8, 11):
        sequence, _ = prefill(engine, ids)
        step(engine, sequence, [2], draft, index)
        kept = () if index is None else paths(draft)[index]
        assert engine.length(sequence) == prompt + 1 + len(kept)
        context = [*ids, 2, *kept]
        for tokens in ([6], [7, 8, 9]):
            after = rows_of(engine, [SequenceStep(sequence, tokens)])[0][0]
            context += tokens
            np.testing.assert_array_equal(after, prefill(engine, context, chunk=200)[1])


def test_a_kept_path_does_not_touch_forks(packed):
    config, _, _, path = packed("int8", "odd head")
    engine = CpuEngine(path, max_seq_len=200)
    ids = random_ids(config, 70)  # a page that is shared, half full
    sequence, _ = prefill(engine, ids)
    fork = engine.fork(sequence)
    draft = random_tree(config, 10, seed=1)
    step(engine, sequence, [2], draft, 9)
    later = engine.fork(sequence)
    step(engine, later, [3], draft, 8)
    for each, context in (
        (fork, ids),
        (sequence, [*ids, 2, *paths(draft)[9]]),
        (later, [*ids, 2, *paths(draft)[9], 3, *paths(draft)[8]]),
    ):
        after = rows_of(engine, [SequenceStep(each, [4])])[0][0]
        np.testing.assert_array_equal(after, prefill(engine, [*context, 4])[1])
    for each in (fork, sequence, later):
        engine.truncate(each, 0)


TREE = Draft((7, 8, 9, 10), parents=(-1, -1, 0, 1))


def opened(packed, name: str):
    config, recipe, tensors, path = packed("int8")
    if name == "cpu":
        return CpuEngine(path, max_seq_len=64)
    return ReferenceEngine(ReferenceModel(config, recipe, tensors), max_seq_len=64)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize(
    "acceptance",
    [
        KeyboardInterrupt,
        Acceptance((0,), 2, (0, 3)),  # no child of the first
        Acceptance((0,), 1, (2,)),  # no child of the last committed token
        Acceptance((0,), 1, (0, 2)),  # another number
        Acceptance((0,), 2),
        Acceptance((0,), 1, (-1,)),
        Acceptance((0,), 5, (0, 2)),
    ],
)
def test_what_is_no_path_is_refused_and_every_sequence_is_as_it_was(packed, name, acceptance):
    engine = opened(packed, name)
    sequences = [prefill(engine, random_ids(engine.config, n))[0] for n in (5, 9)]

    def accept(index, logits):
        if index == 0:
            return Acceptance((0,), 2, (1, 3))
        if isinstance(acceptance, Acceptance):
            return acceptance
        raise acceptance

    with pytest.raises(ValueError if isinstance(acceptance, Acceptance) else acceptance):
        engine.step([SequenceStep(each, [1], TREE) for each in sequences], accept)
    assert [engine.length(each) for each in sequences] == [5, 9]
    after = rows_of(engine, [SequenceStep(sequences[0], [4])])[0][0]
    np.testing.assert_allclose(after, prefill(engine, [*random_ids(engine.config, 5), 4])[1], atol=1e-4)


def test_a_tree_takes_the_places_of_a_chain_in_the_context(packed):
    engine = opened(packed, "cpu")
    sequence, _ = prefill(engine, random_ids(engine.config, 59))
    step(engine, sequence, [1], TREE)
    with pytest.raises(ValueError, match="would hold 65 tokens"):
        step(engine, sequence, [1], TREE)


@pytest.mark.parametrize("recipe", ["bf16", "int8", "mixed, 16-bit activations"])
def test_reference_rows_are_close_to_their_paths(packed, recipe):
    """Within float rounding, but where 8-bit codes may flip: there mostly."""
    config, chosen, tensors, _ = packed(recipe)
    engine = ReferenceEngine(ReferenceModel(config, chosen, tensors), max_seq_len=200)
    ids = random_ids(config, 40)
    draft = random_tree(config, 14, seed=6)
    expected = rows_of_chains(engine, ids, [5, 6], draft)
    sequence, _ = prefill(engine, ids)
    difference = np.abs(step(engine, sequence, [5, 6], draft, 13) - expected)
    assert np.median(difference) < 1e-4 and difference.max() < 0.12 * expected.std()
    context = [*ids, 5, 6, *paths(draft)[13]]
    assert engine.length(sequence) == len(context)
    after = rows_of(engine, [SequenceStep(sequence, [9])])[0][0]
    fresh = prefill(engine, [*context, 9])[1]
    assert np.median(np.abs(after - fresh)) < 1e-4 and np.abs(after - fresh).max() < 0.12 * fresh.std()


def test_both_engines_agree_on_a_tree(packed):
    config, chosen, tensors, path = packed("bf16")
    ids = random_ids(config, 80)
    draft = random_tree(config, 10, seed=2)
    rows = []
    for engine in (
        CpuEngine(path, max_seq_len=200),
        ReferenceEngine(ReferenceModel(config, chosen, tensors), max_seq_len=200),
    ):
        sequence, _ = prefill(engine, ids)
        step(engine, sequence, [1], draft, 7)
        rows.append(step(engine, sequence, [2], draft, 9))
    assert np.abs(rows[0] - rows[1]).max() < 0.02 * rows[1].std()
