"""The eagle drafter: trees of EAGLE's and EAGLE-3's heads, and that nothing but the speed depends on them."""

from __future__ import annotations

import pytest
import torch
from heads import PlainEagle, Watched, eagle_tensors, eagle_values, write_eagle
from tiny import random_ids

from quasar_trt.drafters.eagle_growth import HeadText
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

# third, fields of the configuration, whether fc has a bias, whether the head has an embedding of its own
VARIANTS = {
    "EAGLE": (False, {"hidden_size": 42}, True, True),
    "EAGLE-2": (False, {"hidden_size": 42, "num_key_value_heads": 4}, False, False),
    "EAGLE-3": (True, {"hidden_size": 42, "draft_vocab_size": 90}, True, False),
    "EAGLE-3 of another width": (True, {"hidden_size": 24, "draft_vocab_size": 257}, True, True),
}


def head(engine, directory, variant: str):
    """(directory of a random head, the same plainly)."""
    third, fields, bias, embedding = VARIANTS[variant]
    values = eagle_values(engine.config, **fields)
    tensors = eagle_tensors(engine.config, third, values, bias, embedding)
    write_eagle(directory, values, tensors)
    every = torch.from_numpy(engine.embeddings(range(engine.config.vocab_size)))
    plain = PlainEagle(
        tensors,
        values,
        tensors.get("embed_tokens.weight", every),
        lambda features: torch.from_numpy(engine.head_logits(features.numpy())),
    )
    return directory, plain


@pytest.mark.parametrize(
    ("weights", "name"), [("BF16", "cpu"), ("INT8", "cpu"), ("BF16", "reference"), ("INT8", "reference")]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_are_those_of_the_head_and_ids_those_of_plain_decoding(deep_dirs, tmp_path, weights, name, variant):
    """Requests side by side, rejected and accepted paths, at both temperatures; the head's cache holds what was accepted alone, so its
    trees are those of the whole text computed anew."""
    engine = open_engine(deep_dirs[weights], name, threads=1)
    directory, plain_head = head(engine, tmp_path / "head", variant)
    prompts = [random_ids(engine.config, count, seed=count) for count in (3, 9)]
    for temperature in (0, 0.9):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=16, ignore_eos=True) for seed in (1, 2)]
        plain = Runner(engine).generate(prompts, params)
        answers = {tuple(ids): each.outputs[0].token_ids for ids, each in zip(prompts, plain, strict=True)}
        drafter = Watched(make_drafter(f"eagle:{directory}", {"top_k": 2, "depth": 3}), answers)
        runner = Runner(engine, drafter=drafter, max_draft_len=7)
        found = runner.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in found] == list(answers.values())
        assert runner.stats.num_accepted_tokens > 4
        asked = [each for each in drafter.proposals if len(each[3])]
        assert len(asked) > 6
        for context, limit, draft, states in asked:
            expected = plain_head.tree(context, states, 3, 2, limit)
            assert (draft.ids, draft.parents) == (expected.ids, expected.parents)


@pytest.mark.parametrize(("common", "own", "max_tokens"), [(70, 9, 40), (0, 20, 110)])
@pytest.mark.parametrize("variant", ["EAGLE", "EAGLE-3"])
def test_a_cache_that_was_shared_or_lost_changes_no_ids(deep_dirs, tmp_path, variant, common, own, max_tokens):
    """Prompts that begin alike; and so little room that requests lose their caches."""
    engine = open_engine(deep_dirs["INT8"], "cpu", threads=1)
    directory, _ = head(engine, tmp_path / "head", variant)
    shared = random_ids(engine.config, common)
    prompts = [[*shared, *random_ids(engine.config, own, seed=seed)] for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    plain_runner = Runner(engine)
    plain = [plain_runner.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    plain_runner.reset_prefix_cache()
    drafter = make_drafter(f"eagle:{directory}")
    runner = Runner(engine, drafter=drafter, kv_cache_memory_bytes=engine.bytes_of(192))
    assert [each.outputs[0].token_ids for each in runner.generate(prompts, params)] == plain
    assert bool(runner.service.num_reused_tokens) == bool(common)
    assert bool(runner.service.num_preemptions) == (not common)
    assert runner.stats.num_draft_tokens and not drafter._texts and not drafter._grown


def test_features_that_come_again_are_known_and_a_gap_begins_anew(deep_model):
    from tiny import model_config

    context = list(range(30))
    text = HeadText(context, model_config(deep_model))
    row = torch.arange(30.0)[:, None].expand(30, 42).numpy()
    text.add(0, row[:5])
    text.add(3, row[3:8])  # three of them again
    ids, features, rows = text.next_rows(100)
    assert (ids, features[:, 0].tolist(), list(rows.positions)) == ([*range(1, 9)], [*range(8)], [*range(8)])
    text.read(8, features[-1])
    text.add(20, row[20:29])
    ids, features, rows = text.next_rows(4)
    assert text.num_read == 0 and text.is_known
    assert (ids, features[:, 0].tolist(), list(rows.positions)) == (
        [21, 22, 23, 24],
        [20, 21, 22, 23],
        [20, 21, 22, 23],
    )
