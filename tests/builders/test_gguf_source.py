"""GGUF files: row order undone, blocks dequantized, ids of the rebuilt tokenizer; and the demo model itself."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from tiny import checkpoint_tensors, tiny_llama
from tiny_gguf import byte_vocabulary, dequantized, write_gguf

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.gguf_source import unpermute
from quasar_trt.builders.gguf_tokenizer import build_tokenizer
from quasar_trt.builders.source import open_source
from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import encode, encode_chat, load_tokenizer

SIZES = {"vocab_size": 260, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}


def refusal(path) -> str:
    with pytest.raises(QuasarError) as error:
        open_source(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_of_a_head_go_back_to_their_halves():
    rows = np.arange(8.0, dtype=np.float32)[:, None]  # two heads of size 4 in llama.cpp's order
    assert unpermute(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_and_config_equal_the_models(tmp_path, tied):
    model = tiny_llama(1, tie_word_embeddings=tied, **SIZES)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model)))
    expected_config, expected = checkpoint_tensors(model)
    found_config = source.config.to_dict() | {"norm_epsilon": pytest.approx(1e-5)}
    assert expected_config.to_dict() == found_config
    found = Converter(source).whole()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float()), name
    assert source.notices == []


def test_biases_are_found_and_permuted(tmp_path):
    model = tiny_llama(2, attention_bias=True, **SIZES)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model)))
    assert (source.config.qkv_bias, source.config.dense_bias, source.config.mlp_bias) == (True, True, False)
    expected = checkpoint_tensors(model)[1]["transformer.layers.1.attention.qkv.bias"]
    assert torch.equal(Converter(source).whole()["transformer.layers.1.attention.qkv.bias"], expected.float())


def test_blocks_are_dequantized_and_the_notice_names_them(tmp_path):
    model = tiny_llama(3, **SIZES)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model, block_type="Q8_0")))
    assert source.notices == ["dequantized tensors: 16 Q8_0; the source model is what they hold"]
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(source.tensor(name), dequantized(model.state_dict()[name].numpy(), "Q8_0"))


def test_linear_rope_is_read_and_yarn_refused(tmp_path):
    model = tiny_llama(4, **SIZES)
    linear = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    source = open_source(str(write_gguf(tmp_path / "linear.gguf", model, **linear)))
    assert source.config.rotary_scaling == {"rope_type": "linear", "factor": 4.0}
    write_gguf(tmp_path / "yarn.gguf", model, rope_scaling_type=gguf.RopeScalingType.YARN)
    assert "unknown rope type 'yarn'" in refusal(tmp_path / "yarn.gguf")


def test_llama3_factors_are_recognised(tmp_path, monkeypatch):
    model = tiny_llama(4, **SIZES)
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(factors):
        def write(self):
            self.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
            original(self)

        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write)

    # Llama 3.1: factor 8 for wavelengths above 8192 tokens, 1 below a quarter of that, a blend between.
    frequencies = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    with_factors(1 / ((1 - smooth) / 8 + smooth))
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model)))
    assert source.config.rotary_scaling["rope_type"] == "llama3"
    assert source.config.rotary_scaling["factor"] == 8.0
    with_factors([1, 1, 1, 1, 1, 1, 1, 3])
    write_gguf(tmp_path / "other.gguf", model)
    assert "rope_freqs.weight" in refusal(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "falcon"}, ["unknown architecture 'falcon'", "llama"]),
        ({"expert_count": 4}, ["expert_count = 4"]),
        ({"pre": "dbrx"}, ["pre-tokenizer", "dbrx", "smollm"]),
        ({"head_count_kv": [2, 2]}, ["m.gguf", "llama.attention.head_count_kv = [2, 2]", "layer by layer"]),
        ({"head_count_kv": 4}, ["m.gguf", "num_attention_heads 6", "num_key_value_heads 4"]),
        ({"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 0.0}, ["m.gguf", "'factor'", "0.0"]),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, options, words):
    message = refusal(write_gguf(tmp_path / "m.gguf", tiny_llama(5, **SIZES), **options))
    for word in words:
        assert word in message


def test_block_types_that_cannot_be_dequantized_are_named_when_opened(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(3, **SIZES), block_type="Q8_0")
    monkeypatch.delitem(gguf.quants._type_traits, gguf.GGMLQuantizationType.Q8_0)
    message = refusal(path)
    assert "type Q8_0 cannot be dequantized" in message and "blk.1.ffn_down.weight" in message
    assert "blk.1.ffn_norm.weight" not in message


def test_truncated_and_foreign_files_are_refused(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", tiny_llama(6, **SIZES)).read_bytes()
    for size in (len(whole) - 1000, 200, 10):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "truncated or damaged" in refusal(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    assert "is not a GGUF file" in refusal(tmp_path / "text.gguf")


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(6, **SIZES))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'quasar-trt[gguf]'" in refusal(path)


@pytest.mark.parametrize(("pre", "joined"), [("gpt-2", True), ("smollm", False)])
def test_the_named_pre_tokenizer_decides_about_digits(tmp_path, pre, joined):
    source = open_source(str(write_gguf(tmp_path / "m.gguf", tiny_llama(7, **SIZES), pre=pre)))
    source.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokens = byte_vocabulary(["12"])
    expected = ["12"] if joined else ["1", "2"]
    assert encode(tokenizer, "12") == [tokens.index(token) for token in expected]
    assert tokenizer.decode(encode(tokenizer, "a 12 é")) == "a 12 é"


def test_sentencepiece_joins_by_score():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0]
    fields = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    tokenizer, values = build_tokenizer(fields.get, "here")
    # "▁a" scores best, then "bc"; BOS is SentencePiece's habit; "é" has no token and falls back to its bytes.
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é").ids) == "abc é"
    assert values == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_an_unknown_tokenizer_kind_is_refused():
    fields = {"ggml.model": "bert", "ggml.tokens": ["a"]}
    with pytest.raises(QuasarError, match=r"unknown tokenizer\.ggml\.model in here 'bert'"):
        build_tokenizer(fields.get, "here")


def test_the_demo_model(demo_gguf, tmp_path):
    source = open_source(str(demo_gguf))
    config = source.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (576, 1536, 30)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_size) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rotary_base) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings and config.rotary_scaling is None
    assert source.eos_token_ids == (2,)
    assert source.notices == ["dequantized tensors: 210 Q4_1, 1 Q8_0; the source model is what they hold"]

    reader = gguf.GGUFReader(demo_gguf)
    stored = next(t for t in reader.tensors if t.name == "blk.7.attn_k.weight")
    rows = gguf.quants.dequantize(stored.data, stored.tensor_type)
    order = [h * 64 + i * 2 + half for h in range(3) for half in (0, 1) for i in range(32)]
    found = source.tensor("model.layers.7.self_attn.k_proj.weight")
    assert torch.equal(found, torch.from_numpy(rows[order]))

    source.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    # Each digit is a token of its own, as in the original tokenizer.
    ids = encode(tokenizer, "In 2024: 12345")
    assert [tokenizer.decode([i]) for i in ids] == ["In", " ", "2", "0", "2", "4", ":", " ", "1", "2", "3", "4", "5"]
    assert tokenizer.decode(ids) == "In 2024: 12345"
    chat = encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    assert chat.count(1) == 3 and chat[0] == 1
    assert chat[-4:] == [1, 520, 9531, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
