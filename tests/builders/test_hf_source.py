"""Hugging Face directories: what is read, and what is refused in one line before any weight is read."""

from __future__ import annotations

import json
from fnmatch import fnmatch

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import checkpoint_tensors, model_config, save_hf, tiny_llama, tiny_model
from tiny_tokenizer import save_tokenizer

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.source import open_source
from quasar_trt.errors import QuasarError


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(model) -> str:
    with pytest.raises(QuasarError) as error:
        open_source(str(model))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5}}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
        ("PanguEmbeddedForCausalLM", {}),
        ("PanguEmbeddedForCausalLM", {"attention_bias": False}),
    ],
)
def test_tensors_and_config_equal_the_models(tmp_path, shard, architecture, overrides):
    model = tiny_model(architecture, 3, **overrides)
    source = open_source(str(save_hf(model, tmp_path, shard)))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"
    expected_config, expected = checkpoint_tensors(model)
    assert source.config == expected_config == model_config(model)
    found = dict(Converter(source))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor), name


def test_tied_head_is_the_embedding(tmp_path):
    model = tiny_llama(4, tie_word_embeddings=True)
    source = open_source(str(save_hf(model, tmp_path)))
    assert "lm_head.weight" not in source.names
    tensors = Converter(source)
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.vocab_embedding.weight"])


def test_tied_with_a_head_of_its_own_is_accepted_only_when_equal(tmp_path):
    save_hf(tiny_llama(4, tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    open_source(str(tmp_path))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert "differs from the embedding" in refusal(tmp_path)


def test_untied_without_a_head_is_refused(tmp_path):
    save_hf(tiny_llama(4, tie_word_embeddings=True), tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    assert "missing lm_head.weight [131, 48]" in refusal(tmp_path)


def test_every_missing_shard_and_tensor_is_listed(tmp_path):
    save_hf(tiny_llama(5), tmp_path, "20KB")
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    shards = sorted(set(values["weight_map"].values()))
    for shard in shards[:2]:
        (tmp_path / shard).unlink()
    values["weight_map"]["model.norm.weight"] = shards[-1]
    values["weight_map"]["model.extra.weight"] = shards[-1]
    index.write_text(json.dumps(values))
    message = refusal(tmp_path)
    assert f"shard {shards[0]} is missing" in message
    assert f"shard {shards[1]} is missing" in message
    assert f"model.extra.weight is not in {shards[-1]}, where the index puts it" in message


def test_every_wrong_shape_is_listed_from_the_headers_alone(tmp_path):
    save_hf(tiny_llama(6), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(47)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 80)
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert "model.norm.weight has shape [47], the configuration says [48]" in message
    assert "model.layers.1.mlp.up_proj.weight has shape [48, 80], the configuration says [80, 48]" in message
    assert "missing model.layers.0.input_layernorm.weight [48]" in message


def test_unexpected_tensors_are_noted_and_harmless_buffers_are_not(tmp_path):
    save_hf(tiny_llama(7), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["model.surprise.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    notices = open_source(str(tmp_path)).notices
    assert "unexpected tensors are not used: model.surprise.weight" in notices
    assert not any("inv_freq" in notice for notice in notices)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("MistralForCausalLM", "q_proj.bias"), ("LlamaForCausalLM", "q_norm.weight"), ("Qwen2ForCausalLM", "o_proj.bias")],
)
def test_a_tensor_that_a_layer_would_leave_out_is_refused(tmp_path, architecture, name):
    save_hf(tiny_model(architecture, 7), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.1.self_attn.{name}"] = torch.zeros(16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert f"unexpected model.layers.1.self_attn.{name} [16], {architecture}" in refusal(tmp_path)


def test_float16_is_widened_and_integers_are_refused(tmp_path):
    save_hf(tiny_llama(8), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.full((48,), 1.0009765625, dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    read = open_source(str(tmp_path)).tensor("model.norm.weight")
    assert read.dtype == torch.float32
    assert read[0] == 1.0009765625
    tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.norm.weight has dtype I8, allowed: BF16, F16, F32" in refusal(tmp_path)


def test_missing_and_truncated_files(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    empty = tmp_path / "empty"
    assert f"cannot read {empty}/config.json: No such file or directory; a model is" in refusal(empty)
    directory = save_hf(tiny_llama(9), tmp_path / "model")
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "truncated" in refusal(directory)
    weights.write_bytes(whole + b"more")
    assert "4 bytes after its last tensor" in refusal(directory)
    weights.unlink()
    assert "neither model.safetensors nor" in refusal(directory)
    (directory / "pytorch_model.bin").touch()
    assert "safe_serialization=True" in refusal(directory)
    (directory / "config.json").write_text("{")
    assert "is not JSON" in refusal(directory)


def test_a_failing_hub_gives_one_line(monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise ConnectionError("no route to host\nand a second line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    message = refusal("someone/some-model")
    assert message.startswith("'someone/some-model' is no directory or file here") and "no route to host" in message


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose repositories are all `directory`; `patterns` are those of the last download, None before."""
    import huggingface_hub

    class Hub:
        directory = tmp_path / "hub"
        patterns = None

        def config(self, model, name):
            return str(self.directory / name)

        def snapshot(self, model, allow_patterns):
            self.patterns = allow_patterns
            return str(self.directory)

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.config)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot)
    return hub


def test_a_hub_model_is_refused_before_its_weights_are_fetched(hub):
    save_hf(tiny_model("MistralForCausalLM", 1, sliding_window=32), hub.directory)

    def check(config):
        if config.sliding_window:
            raise QuasarError(f"{config.architecture} has sliding_window = {config.sliding_window}")

    with pytest.raises(QuasarError, match="MistralForCausalLM has sliding_window = 32"):
        open_source("someone/some-model", check=check)
    edit(hub.directory, architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in refusal("someone/some-model")
    assert hub.patterns is None


def test_a_hub_model_is_fetched_without_code_unless_that_is_trusted(hub):
    save_hf(tiny_llama(1), hub.directory)
    source = open_source("someone/some-model")
    assert (source.path, source.config.hidden_size) == ("someone/some-model", 48)
    wanted = ("tokenizer.model", "tokenizer_config.json", "added_tokens.json", "model-00001-of-00002.safetensors")
    for name in wanted:
        assert any(fnmatch(name, pattern) for pattern in hub.patterns), name
    for name in ("tokenization_own.py", "pytorch_model.bin"):
        assert not any(fnmatch(name, pattern) for pattern in hub.patterns), name
    open_source("someone/some-model", trust_remote_code=True)
    assert any(fnmatch("tokenization_own.py", pattern) for pattern in hub.patterns)


def test_a_download_that_breaks_gives_one_line(hub, monkeypatch):
    import huggingface_hub

    save_hf(tiny_llama(1), hub.directory)

    def fail(*args, **kwargs):
        raise OSError("connection reset\nby peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "connection reset by peer; check the name and the network" in refusal("someone/some-model")


def test_a_local_model_is_checked_before_its_tensors(tmp_path):
    save_hf(tiny_llama(1), tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def check(config):
        raise QuasarError(f"{config.max_position_embeddings} positions")

    with pytest.raises(QuasarError, match="512 positions"):
        open_source(str(tmp_path), check=check)


def test_end_of_text_ids_come_from_the_generation_config(tmp_path):
    directory = save_hf(tiny_llama(1), tmp_path)
    edit(directory, eos_token_id=5)
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert open_source(str(directory)).eos_token_ids == (5,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    source = open_source(str(directory))
    assert source.eos_token_ids == (2, 7)
    (tmp_path / "out").mkdir()
    source.write_tokenizer(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [2, 7], "temperature": 0.6}


@pytest.mark.parametrize("value", ["x", [2, None], -1, True])
def test_an_end_of_text_id_that_is_none_is_refused(tmp_path, value):
    directory = save_hf(tiny_llama(1), tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    message = refusal(directory)
    assert "generation_config.json: eos_token_id is" in message and "whole number" in message


def test_no_end_of_text_id_is_written_as_none(tmp_path):
    directory = save_hf(tiny_llama(1), tmp_path)
    edit(directory, eos_token_id=None)
    (directory / "generation_config.json").unlink(missing_ok=True)
    source = open_source(str(directory))
    assert source.eos_token_ids == ()
    (tmp_path / "out").mkdir()
    source.write_tokenizer(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {}


def test_the_tokenizer_is_copied_byte_for_byte(tmp_path):
    directory = save_hf(tiny_llama(1, vocab_size=257), tmp_path / "model")
    save_tokenizer(directory)
    (tmp_path / "out").mkdir()
    open_source(str(directory)).write_tokenizer(tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()
    values = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
