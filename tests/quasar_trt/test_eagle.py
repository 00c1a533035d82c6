"""The eagle drafter: trees of EAGLE's and EAGLE-3's heads, and that nothing but the speed depends on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heads import PlainEagle, Watched, eagle_tensors, eagle_values, paths, write_eagle
from tiny import random_ids

from quasar_trt.drafters.draft_linear import DraftLinears
from quasar_trt.drafters.eagle_growth import HeadText
from quasar_trt.drafters.eagle_head import EagleHead
from quasar_trt.drafters.eagle_layer import LayerPart
from quasar_trt.drafters.eagle_layer_plain import PlainEagleLayer
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.plugins import native
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
    turn, for_head = engine.source_basis.to_source(), engine.source_basis.for_head()
    if turn is not None:
        every = every @ torch.from_numpy(turn).T
    plain = PlainEagle(
        tensors,
        values,
        tensors.get("embed_tokens.weight", every),
        lambda features: torch.from_numpy(
            engine.head_logits(features.numpy() if for_head is None else features.numpy() @ for_head.T)
        ),
    )
    return directory, plain


@pytest.mark.parametrize(
    ("weights", "name"), [("BF16", "cpu"), ("INT8", "cpu"), ("BF16", "reference"), ("INT8", "reference")]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_are_those_of_the_head_and_ids_those_of_plain_decoding(
    deep_dirs, tmp_path, monkeypatch, weights, name, variant
):
    """Requests side by side, rejected and accepted paths, at both temperatures; the head's cache holds what was accepted alone, so its
    trees are those of the whole text computed anew."""
    if name == "reference":  # the head by numpy too
        monkeypatch.setattr(native, "UNAVAILABLE", "not built")
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
            found = [plain_head.joint(context, states, path) for path in paths(draft)]
            expected = plain_head.likeliest(context, states, 3, 2, limit)
            # As likely a tree; near ties fall as rounding has it, and may then lead to a likelier one.
            assert len(found) == len(expected) and found[0] == pytest.approx(expected[0], rel=0.1)
            assert sum(found) > 0.9 * sum(expected)


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


class Layer:
    """Remembers what was asked of it."""

    def __init__(self):
        self.calls = []

    def open(self):
        self.calls.append("open")
        return 5

    def close(self, text):
        self.calls.append(("close", text))

    def truncate(self, text, length):
        self.calls.append(("truncate", text, length))


def test_states_that_come_again_are_known_and_a_gap_begins_anew():
    layer = Layer()
    text = HeadText(list(range(30)), layer)
    row = np.arange(30.0)[:, None, None]
    text.add(0, row[:5])
    text.add(3, row[3:8])  # three of them again
    ids, states, part = text.next_rows(100)
    assert (ids, states[:, 0, 0].tolist(), part) == ([*range(1, 9)], [*range(8)], LayerPart(5, 8))
    text.read(8, states[-1, 0])
    assert layer.calls == ["open", ("truncate", 5, 0)] and text.num_read == 8 and not text.num_pending
    text.add(20, row[20:29])
    assert layer.calls[2:] == [("close", 5)] and text.num_read == 0 and text.is_known
    ids, states, part = text.next_rows(4)
    assert (ids, states[:, 0, 0].tolist(), part) == ([21, 22, 23, 24], [20, 21, 22, 23], LayerPart(5, 4))


@pytest.mark.parametrize("third", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_both_layers_give_the_same_features(deep_dirs, tmp_path, monkeypatch, third, bias):
    """The native decoder and numpy: texts side by side, rows behind those in the cache, a tree that begins there, and what was
    forgotten again. The native one rounds keys and values to BF16."""
    engine = open_engine(deep_dirs["INT8"], "cpu", threads=1)
    values = eagle_values(engine.config, hidden_size=42, draft_vocab_size=90)
    tensors = eagle_tensors(engine.config, third, values)
    if bias:
        prefix = "midlayer." if third else "layers.0."
        tensors[f"{prefix}self_attn.k_proj.bias"] = torch.linspace(-1, 1, 16)
    directory = write_eagle(tmp_path / "head", values, tensors)
    random = np.random.default_rng(0)
    given = [random.standard_normal((count, 42), np.float32) for count in (9, 4, 5)]
    found = {}
    for name in ("native", "numpy"):
        if name == "numpy":
            monkeypatch.setattr(native, "UNAVAILABLE", "not built")
        eagle_head = EagleHead(directory, engine, 8, DraftLinears(engine, "none"))
        layer = eagle_head.layer
        assert isinstance(layer, PlainEagleLayer) == (name == "numpy")
        one, other = layer.open(), layer.open()
        rows = [eagle_head(range(9), given[0], [LayerPart(one, 3), LayerPart(other, 6)])]
        rows.append(eagle_head(range(9, 13), given[1], [LayerPart(other, 1), LayerPart(one, 3)]))
        layer.truncate(one, 5)
        rows.append(eagle_head(range(20, 25), given[2], [LayerPart(one, 5, (-1, 0, -1, 2, 1))]))
        layer.close(other)
        found[name] = np.concatenate(rows)
    np.testing.assert_allclose(found["native"], found["numpy"], atol=0.02 * found["numpy"].std())
