"""The medusa drafter: what its heads propose, on which states, and that nothing but the speed depends on it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from heads import Watched, medusa_logits, medusa_tensors, paths, write_medusa
from tiny import random_ids

from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

WEIGHTS_AND_ENGINES = [("BF16", "cpu"), ("INT8", "cpu"), ("BF16", "reference"), ("INT8", "reference")]


def joint(heads, path) -> float:
    """The probability of a path by the heads' distributions."""
    return math.prod(float(head[token]) for head, token in zip(heads, path, strict=False))


def likeliest(heads, top_k: int, limit: int) -> list[float]:
    """Of every combination of the heads' best guesses the probabilities, the largest of all."""
    guesses = [each.topk(top_k).indices.tolist() for each in heads]
    every = [path for depth in range(1, len(heads) + 1) for path in itertools.product(*guesses[:depth])]
    return sorted((joint(heads, path) for path in every), reverse=True)[:limit]


@pytest.mark.parametrize(("weights", "name"), WEIGHTS_AND_ENGINES)
@pytest.mark.parametrize(("heads", "layers", "shared"), [(3, 1, False), (2, 2, True), (4, 0, False)])
def test_proposals_are_those_of_the_heads_and_ids_those_of_plain_decoding(
    deep_dirs, tmp_path, weights, name, heads, layers, shared
):
    """Requests side by side, chunked prompts, rejected and accepted paths, at both temperatures."""
    engine = open_engine(deep_dirs[weights], name, threads=1)
    tensors = medusa_tensors(engine.config, heads, layers, shared)
    directory = write_medusa(tmp_path / "heads", tensors, heads, layers)
    prompts = [random_ids(engine.config, count, seed=count) for count in (3, 9)]
    for temperature in (0, 0.9):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 2)]
        plain = Runner(engine).generate(prompts, params)
        answers = {tuple(ids): each.outputs[0].token_ids for ids, each in zip(prompts, plain, strict=True)}
        drafter = Watched(make_drafter(f"medusa:{directory}", {"top_k": 3}), answers)
        runner = Runner(engine, drafter=drafter, max_draft_len=7)
        found = runner.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in found] == list(answers.values())
        assert runner.stats.num_accepted_tokens > 4
        asked = [each for each in drafter.proposals if len(each[3])]
        assert len(asked) > 8
        for context, limit, draft, states in asked:
            assert len(states) == len(context) - 1
            distributions = [each.softmax(0) for each in medusa_logits(tensors, heads, layers, states[-1, 0])]
            found = [joint(distributions, path) for path in paths(draft)]
            # Equally likely guesses fall as rounding has it.
            np.testing.assert_allclose(found, likeliest(distributions, 3, limit), rtol=0.1)


def test_without_trees_the_likeliest_path_is_proposed(deep_dirs, tmp_path):
    engine = open_engine(deep_dirs["BF16"], "cpu", threads=1)
    directory = write_medusa(tmp_path / "heads", medusa_tensors(engine.config, 3, 1), 3, 1)
    drafter = make_drafter(f"medusa:{directory}")
    drafter.attach(engine, None, None)
    request = _request(drafter, engine, tree=False)
    (chain,) = drafter.propose([request])
    logits = medusa_logits(
        medusa_tensors(engine.config, 3, 1), 3, 1, torch.from_numpy(_STATE[engine.config.hidden_size])
    )
    assert chain.ids == tuple(int(each.argmax()) for each in logits) and not chain.is_tree


_STATE = {42: torch.randn(42, generator=torch.Generator().manual_seed(3)).numpy()}


def _request(drafter, engine, tree: bool):
    from quasar_trt.drafters.base import DraftRequest

    context = [1, 2, 3, 4]
    drafter.start(0, context)
    drafter.read_states(0, 0, _STATE[engine.config.hidden_size][None, None].repeat(3, axis=0))
    return DraftRequest(0, context, 8, None, tree=tree)


def test_estimates_follow_what_was_right(deep_dirs, tmp_path):
    """One guess of each head is right again and again; its class of probability, which others share, learns it."""
    engine = open_engine(deep_dirs["BF16"], "cpu", threads=1)
    directory = write_medusa(tmp_path / "heads", medusa_tensors(engine.config, 2, 1), 2, 1)
    drafter = make_drafter(f"medusa:{directory}", {"top_k": 2})
    drafter.attach(engine, None, None)
    request = _request(drafter, engine, tree=True)
    (first,) = drafter.propose([request])
    chain = first.ids[0], next(first.ids[child] for child in first.children(0))
    for _ in range(40):
        drafter.observe(0, [*chain, 5], 2)
        (draft,) = drafter.propose([request])
    assert draft.ids == first.ids
    assert draft.estimates[0] > 3 * first.estimates[0]
