"""Trees through the whole runner: ids, log probabilities and scored prompts as without drafts, rows where they pay."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from stubs import StubDrafter, StubEngine, perfect_rule, random_logits
from tiny import random_ids, tiny_checkpoint

from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.draft_length import DraftLengths
from quasar_trt.drafters.base import Draft, Drafter
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.step_cost import StepCost

VOCAB = 6
LOGITS = random_logits(VOCAB, seed=3)
FLAT = {rows: 0.003 * (1 + 0.05 * (rows - 1)) for rows in range(1, 65)}
TREES = {
    "recycle": ("recycle", {}),
    "suffix": ("suffix", {"branches": 3}),
    "history": ("suffix", {"branches": 2, "history_tokens": 80}),
}


# --- drafts


def tree(*nodes: tuple[int, float]) -> Draft:
    """A tree of (parent, estimate), in the order in which drafters give them."""
    return Draft(tuple(range(len(nodes))), tuple(parent for parent, _ in nodes), estimates=tuple(e for _, e in nodes))


def test_first_tokens_of_a_tree_are_a_tree():
    draft = tree((-1, 0.6), (0, 0.5), (-1, 0.2), (2, 0.9), (1, 0.1))
    np.testing.assert_allclose(draft.probabilities, [0.6, 0.3, 0.2, 0.18, 0.03])
    assert draft.is_tree and draft.first(3).is_tree and not draft.first(2).is_tree
    assert draft.first(3) == Draft((0, 1, 2), (-1, 0, -1), None, (0.6, 0.5, 0.2))
    assert [list(draft.children(index)) for index in range(-1, 5)] == [[0, 2], [1], [4], [3], [], []]
    assert [list(Draft((7, 8)).children(index)) for index in (-1, 0, 1)] == [[0], [1], []]


def test_a_draft_goes_on_after_a_chain():
    assert Draft((3, 4)).after([1, 2]) == Draft((1, 2, 3, 4))
    assert tree((-1, 1.0), (-1, 1.0), (1, 1.0)).after([8, 9]) == Draft((8, 9, 0, 1, 2), (-1, 0, 1, 1, 3))
    assert Draft((3, 4), (-1, -1)).after([]) == Draft((3, 4), (-1, -1))


# --- lengths


def expected_tokens(draft: Draft, count: int) -> float:
    return sum(draft.probabilities[:count])


def subtrees(draft: Draft):
    """Every set of tokens that holds the parents of its own."""
    for chosen in itertools.product([False, True], repeat=len(draft)):
        kept = {index for index, keep in enumerate(chosen) if keep}
        if all(draft.parents[index] in {-1, *kept} for index in kept):
            yield kept


def test_the_best_subtree_is_chosen(monkeypatch):
    """100 random trees and tables of costs; every subtree within the free rows is tried."""
    monkeypatch.setattr("quasar_trt.trials._SHARE", 0.0)
    generator = np.random.default_rng(0)
    kinds = set()
    for _ in range(100):
        nodes, probabilities = [], []
        for index in range(7):
            parent = int(generator.integers(-1, index))
            estimate = float(generator.random())
            nodes.append((parent, estimate))
            probabilities.append(estimate * (probabilities[parent] if parent >= 0 else 1.0))
        order = sorted(range(7), key=lambda index, p=probabilities: -p[index])
        place = {-1: -1} | {index: number for number, index in enumerate(order)}
        draft = tree(*[(place[nodes[index][0]], nodes[index][1]) for index in order])
        steps = generator.choice([0.0, 0.02, 0.1, 0.4], 8) * generator.random(8)
        cost = StepCost(dict(enumerate(1 + np.cumsum(steps), 1)))
        free = int(generator.integers(0, 8))
        (count,) = DraftLengths(cost).choose([draft], 1, 1, free)
        best = max(
            (1 + sum(draft.probabilities[index] for index in kept)) / cost.seconds(1 + len(kept))
            for kept in subtrees(draft)
            if len(kept) <= free
        )
        assert (1 + expected_tokens(draft, count)) / cost.seconds(1 + count) == pytest.approx(best, rel=1e-12)
        kinds.add("none" if count == 0 else "tree" if draft.first(count).is_tree else "chain")
    assert kinds == {"none", "chain", "tree"}


def test_trees_and_chains_share_the_rows_of_a_pass():
    drafts = [tree((-1, 0.6), (-1, 0.4), (0, 0.5)), Draft((1, 2), estimates=(0.5, 0.5)), tree((-1, 0.1), (0, 0.1))]
    assert DraftLengths(None).choose(drafts, 3, 3, free=4) == [3, 1, 0]


def test_a_tree_out_of_order_is_still_cut_from_its_end():
    assert DraftLengths(None).choose([tree((-1, 0.1), (-1, 0.8)), Draft((1,), estimates=(0.5,))], 2, 2, free=2) == [
        1,
        1,
    ]


# --- in a runner


class GuessingDrafter(Drafter):
    """Trees of what greedy decoding gives and of random ids; every third draft is a chain, every fifth is empty."""

    num_speculative_tokens = 8

    def __init__(self, rule, vocab: int = VOCAB):
        self.rule, self.vocab, self.num_proposed = rule, vocab, 0

    def propose(self, batch):
        return [self._propose_one(request) for request in batch]

    def _propose_one(self, request):
        self.num_proposed += 1
        generator = np.random.default_rng(self.num_proposed)
        if self.num_proposed % 5 == 0:
            return Draft()
        right = self.rule(request.context, request.limit)
        if self.num_proposed % 3 == 0 or not request.tree:
            return Draft(tuple(right[: request.limit]))
        ids, parents, on_path = [], [], -1
        while len(ids) < min(request.limit, self.num_speculative_tokens):
            if generator.random() < 0.5 and len(right):
                parents.append(on_path)
                on_path = len(ids)
                ids.append(right.pop(0))
            else:
                parents.append(int(generator.integers(-1, len(ids))) if ids else -1)
                ids.append(int(generator.integers(self.vocab)))
        return Draft(tuple(ids), tuple(parents))


PROMPTS = [[1, 2, 1], [4], [2, 2, 3, 2, 2], [1, 2, 1, 5, 5, 5, 5, 5]]


@pytest.mark.parametrize("max_rows", [5, 24])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_log_probabilities_and_scored_prompts_are_those_of_plain_decoding(temperature, max_rows):
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=30,
            presence_penalty=0.7,
            logprobs=1,
            prompt_logprobs=None if seed % 2 else 1,
        )
        for seed in range(len(PROMPTS))
    ]
    outputs = []
    for drafter in (None, GuessingDrafter(perfect_rule(LOGITS))):
        runner = Runner(StubEngine(LOGITS, VOCAB, max_rows=max_rows), drafter=drafter, max_batch_size=3)
        outputs.append(
            [
                (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
                for output in runner.generate(PROMPTS, params)
            ]
        )
    assert outputs[0] == outputs[1]
    assert runner.stats.num_accepted_tokens > 10


def test_a_draft_with_branches_comes_with_the_last_chunk_of_a_scored_prompt():
    """Token 7 of the scored prompt and its draft are one tree: the prompt, then what branches."""

    class Branching(StubDrafter):
        def _propose_one(self, request):
            right = perfect_rule(LOGITS)(request.context, 2)
            wrong = (right[0] + 1) % VOCAB
            return Draft((wrong, *right), (-1, -1, 1)) if request.limit >= 3 else Draft()

    engine = StubEngine(LOGITS, VOCAB)
    runner = Runner(engine, drafter=Branching(None))
    (output,) = runner.generate([3, 1, 2], SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=0))
    assert engine.passes[0].tokens == [[3]] and engine.passes[0].drafts[0][:2] == (1, 2)
    assert engine.accepted[0][0].path == (0, 1, 3, 4)
    assert runner.stats.num_accepted_tokens == 4
    assert output.outputs[0].token_ids == perfect_rule(LOGITS)([3, 1, 2], 9)
    assert output.metrics.num_accepted_tokens_per_pos == [2, 2, 0]


@pytest.mark.parametrize("name", TREES)
def test_engines_without_trees_get_chains(name):
    drafter, options = TREES[name]
    engine = StubEngine(LOGITS, VOCAB, tree=False)
    plain = Runner(StubEngine(LOGITS, VOCAB)).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30))
    runner = Runner(engine, drafter=make_drafter(drafter, options))
    outputs = runner.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30))
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    assert runner.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("table", [None, FLAT])
@pytest.mark.parametrize("name", TREES)
def test_drafts_really_branch(name, table):
    drafter, options = TREES[name]
    engine = StubEngine(LOGITS, VOCAB)
    branching = []
    step = engine.step
    engine.step = lambda batch, accept: branching.extend(each.draft.is_tree for each in batch) or step(batch, accept)
    runner = Runner(engine, drafter=make_drafter(drafter, options), step_cost=table and StepCost(table))
    runner.generate([[1, 2] * 10, [3]] * 2, SamplingParams(seed=1, max_tokens=60))
    assert any(branching) and not all(branching)


@pytest.fixture(scope="module", params=["bf16", "int8"])
def packed_model(request, tmp_path_factory):
    """(config, recipe, tensors, path of the packed weights)"""
    model = tiny_checkpoint(3, Recipe("none" if request.param == "bf16" else "int8"))
    path = tmp_path_factory.mktemp("packed") / "rank0.engine"
    compile_cpu(*model, path)
    return *model, path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", TREES)
def test_drafted_ids_equal_plain_ids_on_the_native_engine(packed_model, name, temperature):
    """Four requests in passes of up to three, lengths by costs that favour drafts, and whole drafts; 1, 2 and 3 threads."""
    engines = [CpuEngine(packed_model[-1], max_seq_len=512, threads=threads) for threads in (1, 2, 3)]
    params = [SamplingParams(temperature=temperature, top_k=2, seed=seed, max_tokens=24) for seed in range(4)]
    prompts = [random_ids(packed_model[0], count, seed=count) * 2 for count in (1, 4, 9, 127)]

    def generate(engine, **options):
        runner = Runner(engine, max_batch_size=3, **options)
        return [output.outputs[0].token_ids for output in runner.generate(prompts, params)], runner.stats

    plain, _ = generate(engines[0])
    drafter, options = TREES[name]
    num_accepted_tokens = 0
    for engine, cost in zip(engines, (None, StepCost(FLAT), None), strict=True):
        drafted, stats = generate(engine, drafter=make_drafter(drafter, options), step_cost=cost)
        assert drafted == plain
        num_accepted_tokens += stats.num_accepted_tokens
    assert num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_right_and_wrong_branches_among_chains_change_no_id_on_the_native_engine(packed_model, temperature):
    """Three prompts together, each drafted by trees that hold its plain ids, chains of these, and nothing."""
    engine = CpuEngine(packed_model[-1], max_seq_len=512, threads=2)
    params = SamplingParams(temperature=temperature, top_k=2, seed=5, max_tokens=40)
    prompts = [random_ids(packed_model[0], count, seed=count) for count in (3, 60, 250)]
    plain = [output.outputs[0].token_ids for output in Runner(engine).generate(prompts, params)]
    whole = {prompt[0]: prompt + ids for prompt, ids in zip(prompts, plain, strict=True)}
    drafter = GuessingDrafter(lambda context, limit: whole[context[0]][len(context) :][:limit], 131)
    runner = Runner(engine, drafter=drafter)
    assert [output.outputs[0].token_ids for output in runner.generate(prompts, params)] == plain
    assert runner.stats.num_accepted_tokens > 40


@pytest.mark.parametrize("name", TREES)
def test_drafted_ids_equal_plain_ids_on_the_reference_engine(packed_model, name):
    config, recipe, tensors, _ = packed_model
    engine = ReferenceEngine(ReferenceModel(config, recipe, tensors), max_seq_len=512)
    prompts = [random_ids(engine.config, count, seed=count) * 2 for count in (4, 9)]
    params = SamplingParams(temperature=0, max_tokens=24)
    drafter, options = TREES[name]
    runner = Runner(engine, drafter=make_drafter(drafter, options))
    drafted = [output.outputs[0].token_ids for output in runner.generate(prompts, params)]
    assert drafted == [output.outputs[0].token_ids for output in Runner(engine).generate(prompts, params)]
    assert runner.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", TREES)
def test_joins_aborts_forks_and_preemptions_among_trees_change_no_id(packed_model, name):
    """As for chains: 24 requests with common prefixes and several completions, over little memory."""
    draw = random.Random(2)
    engine = CpuEngine(packed_model[-1], max_seq_len=512, threads=1)
    drafter, options = TREES[name]
    runner = Runner(
        engine,
        drafter=make_drafter(drafter, options),
        max_batch_size=8,
        step_cost=StepCost({1: 1.0, 8: 1.5, 64: 9.0}),
        kv_cache_memory_bytes=8 * engine.bytes_of(1),
    )
    requests = []
    for _ in range(24):
        prompt = [
            *(random_ids(engine.config, 80, seed=1) if draw.random() < 0.5 else []),
            *random_ids(engine.config, draw.randrange(1, 40), seed=draw.randrange(99)),
        ]
        params = SamplingParams(
            n=draw.choice([1, 2]),
            temperature=0.7,
            top_k=3,
            seed=draw.randrange(100),
            max_tokens=draw.randrange(1, 60),
            prompt_logprobs=draw.choice([None, None, 0]),
        )
        requests.append((prompt, params))
    generations = [runner.prepare(*each) for each in requests]
    aborted = set(draw.sample(range(24), 4))
    for generation in generations:
        runner.submit(generation)
    num_steps = 0
    while not all(generation.finished for generation in generations):
        runner.step()
        num_steps += 1
        if num_steps == 12:
            for index in aborted:
                runner.abort(generations[index])
        assert engine.cache_bytes <= runner.load.kv_limit
    assert runner.service.num_preemptions > 0 and runner.stats.num_accepted_tokens > 0
    runner.reset_prefix_cache()
    assert engine.cache_bytes == 0
    plain = Runner(engine)
    for index, (prompt, params) in enumerate(requests):
        (expected,) = plain.generate([prompt], params)
        for found, wanted in zip(generations[index].output().outputs, expected.outputs, strict=True):
            if index in aborted:
                assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
            else:
                assert found.token_ids == wanted.token_ids
        plain.reset_prefix_cache()
