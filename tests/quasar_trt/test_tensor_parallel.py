"""Tensor parallel checkpoints: the shards are the whole model, the ranks compute what it computes, and one process refuses them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import RECIPES, SIZES
from tiny import MODELS, model_config, tiny_checkpoint, tiny_model
from torch import Tensor

from quasar_trt.architectures import hadamard_blocks
from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.sharded_writer import ShardedWriter, shard
from quasar_trt.checkpoint import Checkpoint, checkpoint_config, checkpoint_spec
from quasar_trt.engines import open_engine
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import map_tensors


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
def test_a_rank_has_its_share_of_heads_and_intermediate_size(tp_size):
    config = model_config(tiny_model("LlamaForCausalLM", **SIZES))
    rank = rank_config(config, tp_size)
    assert rank.num_attention_heads * tp_size == 12 and rank.num_key_value_heads * tp_size == 6
    assert rank.intermediate_size * tp_size == 96
    assert (rank.hidden_size, rank.vocab_size, rank.head_size) == (48, 131, 8)
    assert rank.logits_size == {1: 131, 2: 66, 3: 44, 6: 22}[tp_size]
    assert (rank == config) == (tp_size == 1)
    for recipe in (RECIPES["rotated"], RECIPES["mixed"]):
        blocks = hadamard_blocks(rank, recipe)
        assert blocks == {"attention.dense": 8, "mlp.proj": {1: 32, 2: 16, 3: 32, 6: 16}[tp_size]}


@pytest.mark.parametrize(
    ("sizes", "tp_size", "message"),
    [
        ({}, 4, "tp_size 4 does not divide num_key_value_heads 6; allowed for this model: 1, 2, 3, 6"),
        (
            {"num_key_value_heads": 2},
            8,
            "tp_size 8 does not divide num_attention_heads 12, num_key_value_heads 2; allowed for this model: 1, 2",
        ),
        (
            {"intermediate_size": 100},
            3,
            "tp_size 3 does not divide intermediate_size 100; allowed for this model: 1, 2",
        ),
        ({"num_key_value_heads": 1}, 2, "tp_size 2 does not divide num_key_value_heads 1; allowed for this model: 1"),
        ({}, 0, "tp_size is 0; it must be a whole number of at least 1"),
        ({}, "2", "tp_size is '2'; it must be a whole number of at least 1"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_allowed_ones(sizes, tp_size, message, tmp_path):
    config = model_config(tiny_model("LlamaForCausalLM", **SIZES))
    config = dataclasses.replace(config, **sizes)
    for refused in (
        lambda: rank_config(config, tp_size),
        lambda: checkpoint_config(config, Recipe(), tp_size),
        lambda: ShardedWriter(tmp_path, config, Recipe(), tp_size),
    ):
        with pytest.raises(QuasarError) as caught:
            refused()
        assert str(caught.value) == message
    assert not list(tmp_path.iterdir())


def random_tensors(config: ModelConfig, recipe: Recipe) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint in which every value tells where it is from."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, spec in checkpoint_spec(config, recipe).items():
        if spec.dtype == "I8":
            tensors[name] = torch.randint(-127, 128, spec.shape, generator=generator).to(torch.int8)
        else:
            values = torch.randn(spec.shape, generator=generator)
            tensors[name] = values.bfloat16() if spec.dtype == "BF16" else values
    return tensors


def write_checkpoint(directory: Path, config: ModelConfig, recipe: Recipe, tensors: dict, tp_size: int) -> dict:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(checkpoint_config(config, recipe, tp_size)))
    with ShardedWriter(directory, config, recipe, tp_size) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return writer.records


def rebuilt(name: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
    """The whole tensor of the ranks' parts, by the rules of the layout spelled out once more."""
    linear, _, kind = name.rpartition(".")
    dim = 1 if kind == "per_channel_scale" else 0
    if linear == "lm_head":
        whole = torch.cat(parts, dim)
        assert len(parts) * parts[0].shape[dim] - whole.narrow(dim, 0, config.vocab_size).shape[dim] < len(parts)
        padding = whole.narrow(dim, config.vocab_size, whole.shape[dim] - config.vocab_size)
        assert (padding == (1 if kind == "per_channel_scale" else 0)).all()
        return whole.narrow(dim, 0, config.vocab_size)
    if linear.endswith("attention.qkv"):
        sizes = [size // len(parts) for size in (config.attention_size, config.kv_size, config.kv_size)]
        return torch.cat(
            [torch.cat(part, dim) for part in zip(*(p.split(sizes, dim) for p in parts), strict=True)], dim
        )
    if linear.endswith(("mlp.fc", "mlp.gate")):
        return torch.cat(parts, dim)
    if linear.endswith(("attention.dense", "mlp.proj")) and kind in ("weight", "smoother"):
        return torch.cat(parts, dim=1)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("architecture", MODELS)
def test_the_whole_model_is_rebuilt_from_the_shards(architecture, recipe, tp_size, tmp_path):
    config = model_config(tiny_model(architecture, num_hidden_layers=2, **SIZES))
    tensors = random_tensors(config, RECIPES[recipe])
    records = write_checkpoint(tmp_path / "checkpoint", config, RECIPES[recipe], tensors, tp_size)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    assert (checkpoint.config, checkpoint.recipe, checkpoint.tp_size) == (config, RECIPES[recipe], tp_size)
    assert [str(path.relative_to(tmp_path)) for path in checkpoint.paths] == list(records)
    ranks = [load_tensors(path) for path in checkpoint.paths]
    assert len(ranks) == tp_size and all(list(rank) == list(tensors) for rank in ranks)
    for name, tensor in tensors.items():
        found = rebuilt(name, [rank[name] for rank in ranks], config)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_biases_of_the_mlp_and_of_qkv_alone_are_rebuilt(tmp_path):
    config = model_config(tiny_model("LlamaForCausalLM", **SIZES))
    config = dataclasses.replace(config, qkv_bias=True, mlp_bias=True)
    tensors = random_tensors(config, Recipe())
    write_checkpoint(tmp_path / "checkpoint", config, Recipe(), tensors, 2)
    ranks = [load_tensors(path) for path in Checkpoint.open(tmp_path / "checkpoint").paths]
    biases = [name for name in tensors if name.endswith(".bias")]
    assert len(biases) == 4 * config.num_hidden_layers
    for name in biases:
        assert torch.equal(rebuilt(name, [rank[name] for rank in ranks], config), tensors[name])


def test_ranks_past_the_end_of_a_tiny_vocabulary_hold_only_padding():
    config = dataclasses.replace(model_config(tiny_model("LlamaForCausalLM", **SIZES)), vocab_size=7)
    weight = torch.ones(7, 48, dtype=torch.int8)
    parts = [shard("lm_head.weight", weight, config, 6, rank) for rank in range(6)]
    assert [part.sum(dim=1).tolist() for part in parts] == [[48, 48]] * 3 + [[48, 0]] + [[0, 0]] * 2
    scales = [shard("lm_head.per_channel_scale", torch.zeros(1, 7), config, 6, rank) for rank in range(6)]
    assert [scale.tolist() for scale in scales] == [[[0, 0]]] * 3 + [[[0, 1]]] + [[[1, 1]]] * 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """An engine directory with tp_size 2; read-only."""
    directory = tmp_path_factory.mktemp("engines") / "two"
    config, recipe, tensors = tiny_checkpoint(0, RECIPES["textbook"], **SIZES)
    files = write_checkpoint(directory / "checkpoint", config, recipe, tensors, 2)
    for rank, path in enumerate(Checkpoint.open(directory / "checkpoint").paths):
        name = f"rank{rank}.engine"
        files[name] = compile_cpu(rank_config(config, 2), recipe, load_tensors(path), directory / name, rank=rank)
    Manifest(
        producer={"tests": "0"},
        target="cpu",
        limits=Limits(max_batch_size=8, max_seq_len=256, max_draft_len=8),
        tp_size=2,
        recipe=recipe,
        source={"path": "tiny", "kind": "random", "notices": []},
        calibration=None,
        files=files,
    ).write(directory)
    return directory


@pytest.fixture
def damaged(two_ranks, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(two_ranks, tmp_path / "engine"))


def test_the_packed_file_of_each_rank_holds_its_part_of_the_head(two_ranks):
    config, _, tensors = tiny_checkpoint(0, RECIPES["textbook"], **SIZES)
    rows = []
    for rank in range(2):
        packed = map_tensors(two_ranks / f"rank{rank}.engine")
        assert packed["transformer.vocab_embedding.weight"].shape == (131, 48)
        weight = packed["lm_head.weight"].transpose(0, 2, 1, 3).reshape(-1, 48)
        assert not weight[66:].any()  # blocks of 16 rows
        rows.append(weight[:66])
    assert not rows[1][-1].any()
    whole = tensors["lm_head.weight"].view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(np.concatenate(rows)[: config.vocab_size], whole)


def test_every_rank_of_an_engine_directory_is_checked(two_ranks):
    manifest = Manifest.open(two_ranks)
    manifest.verify(two_ranks)
    assert manifest.tp_size == 2 and set(manifest.files) == {
        "checkpoint/rank0.safetensors",
        "checkpoint/rank1.safetensors",
        "rank0.engine",
        "rank1.engine",
    }


@pytest.mark.parametrize("name", ["checkpoint/rank1.safetensors", "rank1.engine"])
def test_a_missing_rank_is_refused(name, damaged):
    (damaged / name).unlink()
    with pytest.raises(QuasarError, match=f"{name} is missing; build the engine again"):
        Manifest.open(damaged)


@pytest.mark.parametrize("names", ["checkpoint/rank{}.safetensors", "rank{}.engine"])
def test_exchanged_ranks_are_refused(names, damaged):
    first, second = (damaged / names.format(rank) for rank in range(2))
    aside = first.rename(damaged / "aside")
    second.rename(first)
    aside.rename(second)
    with pytest.raises(QuasarError, match="has another header than the manifest says"):
        Manifest.open(damaged)


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [(1, r"2 of checkpoint/rank\*.safetensors, tp_size is 1"), (3, r"2 of .*, tp_size is 3"), (0, "tp_size is 0")],
)
def test_a_manifest_of_another_tp_size_is_refused(tp_size, message, damaged):
    path = damaged / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tp_size": tp_size}))
    with pytest.raises(QuasarError, match=f"is damaged: .*{message}"):
        Manifest.open(damaged)


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [
        (
            1,
            r"rank0.safetensors does not match its config.json: .*attention.qkv.weight is I8 \[96, 48\], must be I8 \[192, 48\]",
        ),
        (3, r"rank0.safetensors does not match its config.json"),
        (4, "tp_size 4 does not divide num_key_value_heads 6; allowed for this model: 1, 2, 3, 6"),
        ("2", "tp_size is '2'"),
    ],
)
def test_a_checkpoint_of_another_tp_size_is_refused(tp_size, message, damaged):
    path = damaged / "checkpoint" / "config.json"
    values = json.loads(path.read_text())
    values["mapping"]["tp_size"] = tp_size
    path.write_text(json.dumps(values))
    with pytest.raises(QuasarError, match=message):
        Checkpoint.open(damaged / "checkpoint")


def test_a_checkpoint_without_one_rank_is_refused(damaged):
    (damaged / "checkpoint" / "rank1.safetensors").unlink()
    with pytest.raises(QuasarError, match=r"cannot read .*rank1\.safetensors"):
        Checkpoint.open(damaged / "checkpoint")


def test_a_single_process_refuses_an_engine_of_several_ranks(two_ranks):
    for open_it in (
        lambda: open_engine(two_ranks),
        lambda: open_engine(two_ranks, "cpu"),
        lambda: open_engine(two_ranks, "reference"),
        lambda: ReferenceEngine.from_dir(two_ranks),
        lambda: CpuEngine(two_ranks / "rank1.engine", max_seq_len=64),
        lambda: Runner.from_dir(two_ranks),
    ):
        with pytest.raises(
            QuasarError,
            match=r"has tp_size 2, and this is a single process; start .* mpirun -n 2 .*build with --tp-size 1",
        ) as caught:
            open_it()
        assert "\n" not in str(caught.value)
