"""Token recycling: the adjacency of tokens, the tree that is proposed from it, and its estimates."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from stubs import StubEngine, paths, random_logits

from quasar_trt.drafters.adjacency import IN_PROMPT, NUM_KINDS, Adjacency, largest
from quasar_trt.drafters.base import NO_DRAFT, Draft, DraftRequest
from quasar_trt.drafters.recycle import _PRIORS
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.drafters.tree import likeliest_tree
from quasar_trt.errors import QuasarError
from quasar_trt.runner import Runner
from quasar_trt.sampling import Sampler
from quasar_trt.sampling_params import SamplingParams

SAMPLER = Sampler(SamplingParams())


@pytest.mark.parametrize("vocab", [3, 8, 500, 1024, 1500, 5000])
def test_largest_logits_come_in_falling_order(vocab):
    generator = np.random.default_rng(vocab)
    padded = generator.normal(0, 3, (5, vocab + 13)).astype(np.float32)
    logits = padded[:, :vocab]  # rows that do not lie one behind the other, as an engine's
    logits[1, vocab // 2 :] = -np.inf
    ids, values = largest(logits, 8)
    assert ids.shape == values.shape == (5, min(vocab, 8))
    for row, found, value in zip(logits, ids, values, strict=True):
        np.testing.assert_array_equal(row[found], value)
        np.testing.assert_array_equal(value, np.sort(row)[::-1][:8])
        assert len(set(found.tolist())) == len(found)
    logits[2, vocab - 1] = np.nan
    assert np.isnan(largest(logits, 8)[1]).any(axis=1).tolist() == [False, False, True, False, False]


def test_kind_is_the_class_of_the_share_among_the_best():
    adjacency = Adjacency()
    certain = [50.0, *[0.0] * 7]
    shares = np.log(np.float32([[0.58, 0.3, 0.12, *[1e-9] * 5]]))
    adjacency.put([1, 2], np.arange(16).reshape(2, 8), np.concatenate([shares, [certain]]))
    assert adjacency.candidates(1) == [(0, 6), (1, 4), (2, 3), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)]
    assert [kind for _, kind in adjacency.candidates(2)] == [IN_PROMPT - 1, *[0] * 7]
    assert len(_PRIORS) == NUM_KINDS


def test_a_small_vocabulary_has_fewer_candidates():
    adjacency = Adjacency()
    adjacency.put([2], *largest(np.float32([[0.0, 2.0, 1.0]]), 8))
    assert [token for token, _ in adjacency.candidates(2)] == [1, 2, 0]


def test_later_rows_replace_earlier_ones_and_prompts_only_fill_gaps():
    adjacency = Adjacency()
    assert adjacency.candidates(7) == []
    adjacency.put_prompt([7, 3, 7, 4, 200])
    assert adjacency.candidates(7) == [(4, IN_PROMPT)] and adjacency.candidates(3) == [(7, IN_PROMPT)]
    assert adjacency.candidates(200) == [] and adjacency.candidates(10_000) == []
    ids = np.arange(24, dtype=np.int32).reshape(3, 8)
    adjacency.put([7, 900, 7], ids, np.float32([[9, 8, 7, 6, 5, 4, 3, 2]] * 3))
    assert [each for each, _ in adjacency.candidates(7)] == list(range(16, 24))
    assert [each for each, _ in adjacency.candidates(900)] == list(range(8, 16))
    adjacency.put_prompt([7, 5, 3, 1])
    assert adjacency.candidates(7)[0][0] == 16 and adjacency.candidates(3) == [(7, IN_PROMPT)]


def test_a_vocabulary_of_fifty_thousand_takes_four_megabytes_at_most():
    adjacency = Adjacency()
    adjacency.put_prompt([1, 2])
    adjacency.put_prompt([49_151, 0])
    assert 2e6 > adjacency._ids.nbytes >= 49_152 * 32 and adjacency._ids.nbytes + adjacency._kinds.nbytes < 4e6


def test_tree_holds_the_likeliest_tokens_of_all_in_falling_order():
    """Against a search of the whole tree of three levels and a table of random estimates."""
    generator = np.random.default_rng(3)
    for _ in range(50):
        table = generator.random((4, 3))

        def continuations(state, table=table):
            last, depth = state
            return [
                (3 * last % 4 + each, float(table[last, each]), ((3 * last + each) % 4, depth + 1)) for each in range(3)
            ]

        draft = likeliest_tree((0, 0), lambda state: continuations(state) if state[1] < 3 else [], 9)
        every = []
        for length in (1, 2, 3):
            for choice in itertools.product(range(3), repeat=length):
                state, probability = 0, 1.0
                for each in choice:
                    probability *= table[state, each]
                    state = (3 * state + each) % 4
                every.append(probability)
        found = draft.probabilities
        np.testing.assert_allclose(found, sorted(every, reverse=True)[:9], rtol=1e-12)
        assert len(set(paths(draft))) <= 9 and all(parent < i for i, parent in enumerate(draft.parents))
    assert likeliest_tree(0, lambda state: [], 5) == NO_DRAFT


def drafter_of(rows: dict[int, list[tuple[int, float]]], vocab: int = 20):
    """A drafter that has seen a row for each token: its most probable followers, with their probabilities."""
    drafter = make_drafter("recycle")
    for token, followers in rows.items():
        logits = np.full((1, vocab), -30.0, np.float32)
        for follower, probability in followers:
            logits[0, follower] = np.log(probability)
        drafter.start(99, [token])
        drafter.read(99, NO_DRAFT, logits)
        drafter.observe(99, [], 0)
        drafter.stop(99)
    return drafter


ROWS = {1: [(2, 0.9), (3, 0.1)], 2: [(4, 0.6), (5, 0.4)], 3: [(6, 1.0)], 4: [(7, 1.0)]}


def test_proposal_is_a_tree_where_trees_are_verified_and_its_best_path_elsewhere():
    drafter = drafter_of(ROWS)
    context = [0, 1]
    drafter.start(0, context)
    (tree,) = drafter.propose([DraftRequest(0, context, 5, SAMPLER, tree=True)])
    assert set(paths(tree)[:4]) == {(2,), (2, 4), (2, 5), (2, 4, 7)} and tree.is_tree
    assert tree.probs is None and sorted(tree.probabilities, reverse=True) == tree.probabilities
    (chain,) = drafter.propose([DraftRequest(0, context, 5, SAMPLER)])
    assert chain.ids[:3] == (2, 4, 7) and not chain.is_tree


def test_rows_of_rejected_tokens_are_read_too():
    drafter = make_drafter("recycle")
    context = [1]
    drafter.start(0, context)
    logits = np.full((3, 20), -30.0, np.float32)
    logits[[0, 1, 2], [5, 6, 7]] = 0.0
    drafter.read(0, Draft((9, 8), parents=(-1, -1)), logits)
    context.append(5)
    drafter.observe(0, [5], 0)
    for token, follower in ((1, 5), (9, 6), (8, 7)):
        assert drafter._adjacency.candidates(token)[0][0] == follower


def test_a_row_that_is_no_distribution_is_not_read():
    drafter = make_drafter("recycle")
    context = [1]
    drafter.start(0, context)
    logits = np.zeros((3, 20), np.float32)
    logits[0, 5], logits[1, 3], logits[2, 7] = 9.0, np.nan, 9.0
    drafter.read(0, Draft((9, 8)), logits)
    context.append(5)
    drafter.observe(0, [5], 0)
    assert drafter._adjacency.candidates(9) == [] and drafter._adjacency.candidates(8)[0][0] == 7


def test_estimates_are_calibrated():
    """Text of 8 000 tokens from a Markov chain over 60, whose rows are what the verifier computes: of all candidates with
    like estimates, the share that turns out right is within 0.05 of them."""
    vocab = 60
    generator = np.random.default_rng(7)
    table = generator.normal(0, 2.5, (vocab, vocab)).astype(np.float32)
    shares = np.exp(table - table.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    drafter = make_drafter("recycle")
    context = [0]
    drafter.start(0, context)
    answers = []
    for position in range(8000):
        (draft,) = drafter.propose([DraftRequest(0, context, 8, SAMPLER, tree=True)])
        token = int(generator.choice(vocab, p=shares[context[-1]]))
        if position > 1000:
            answers += [(draft.estimates[i], draft.ids[i] == token) for i in draft.children(-1)]
        drafter.read(0, NO_DRAFT, table[context[-1]][None])
        context.append(token)
        drafter.observe(0, [token], 0)
    answers.sort()
    for part in np.array_split(np.array(answers, float), 6):
        assert part[:, 0].mean() == pytest.approx(part[:, 1].mean(), abs=0.05)


def test_recycled_rows_are_accepted_where_text_does_not_repeat():
    """Rows depend on the last token alone, each but once seen: suffixes help late, rows of rejected tokens at once."""
    table = np.random.default_rng(1).normal(0, 2, (12, 12)).astype(np.float32)

    def logits(prefix):
        return table[prefix[-1]]

    params = SamplingParams(temperature=1.0, seed=4, max_tokens=200)
    plain = Runner(StubEngine(logits, 12)).generate([1, 2], params)[0].outputs[0].token_ids
    runner = Runner(StubEngine(logits, 12), drafter=make_drafter("recycle"), max_draft_len=8)
    output = runner.generate([1, 2], params)[0].outputs[0]
    assert output.token_ids == plain
    assert runner.stats.mean_acceptance_length > 1.6


@pytest.mark.parametrize("tree", [False, True])
def test_requests_that_end_leave_nothing_but_the_adjacency(tree):
    drafter = make_drafter("recycle")
    runner = Runner(StubEngine(random_logits(6, seed=3), 6, tree=tree), drafter=drafter, max_batch_size=2)
    runner.generate([[1, 2], [3], [4, 5, 4]], SamplingParams(seed=1, max_tokens=9))
    assert not drafter._contexts and not drafter._read
    assert runner.stats.num_accepted_tokens > 0


def test_a_request_that_is_not_drafted_is_not_read():
    drafter = make_drafter("recycle")
    runner = Runner(StubEngine(random_logits(6, seed=3), 6), drafter=drafter)
    generation = runner.prepare([1, 2], SamplingParams(seed=1, max_tokens=5), drafts=False)
    runner.submit(generation)
    while not generation.finished:
        runner.step()
    assert not any(drafter._adjacency.candidates(token) for token in range(6))


def test_an_engine_that_gives_no_logits_is_refused():
    engine = StubEngine(random_logits(5), 5)
    engine.capabilities = dataclasses.replace(engine.capabilities, accepts_inside=True)
    with pytest.raises(
        QuasarError, match="RecycleDrafter learns from the verifier's logits, and StubEngine samples by"
    ):
        Runner(engine, drafter=make_drafter("recycle"))
    Runner(engine, drafter=make_drafter("suffix"))
