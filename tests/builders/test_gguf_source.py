"""GGUF files: row order undone, blocks dequantized, ids of the rebuilt tokenizer; and the demo model itself."""

from __future__ import annotations

import json
import sys

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from tiny import LLAMA3, checkpoint_tensors, save_hf, tiny_llama, tiny_model
from tiny_gguf import dequantized, write_gguf
from tiny_tokenizer import TEXTS, save_sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast

from quasar_trt.builders.convert import Converter
from quasar_trt.builders.gguf_source import unpermute
from quasar_trt.builders.gguf_tokenizer import build_tokenizer
from quasar_trt.builders.source import open_source
from quasar_trt.errors import QuasarError
from quasar_trt.rope import rope_tables
from quasar_trt.tokenizer import decode, encode, encode_chat, load_tokenizer

SIZES = {"vocab_size": 260, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}


def refusal(path) -> str:
    with pytest.raises(QuasarError) as error:
        open_source(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_of_a_head_go_back_to_their_halves():
    rows = np.arange(8.0, dtype=np.float32)[:, None]  # two heads of size 4 in llama.cpp's order
    assert unpermute(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("PanguEmbeddedForCausalLM", {}),
    ],
)
def test_a_file_is_the_same_source_as_the_hugging_face_directory(tmp_path, architecture, overrides):
    model = tiny_model(architecture, 1, **SIZES, **overrides)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model)))
    original = open_source(str(save_hf(model, tmp_path / "model")))
    named = "LlamaForCausalLM" if architecture == "MistralForCausalLM" else architecture  # files of either say "llama"
    expected = original.config.to_dict() | {"architecture": named, "norm_epsilon": pytest.approx(1e-5)}
    assert expected == source.config.to_dict()
    found, tensors = dict(Converter(source)), dict(Converter(original))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.float()), name
    assert source.notices == []


def test_biases_are_found_and_permuted(tmp_path):
    model = tiny_llama(2, attention_bias=True, **SIZES)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model)))
    assert (source.config.qkv_bias, source.config.dense_bias, source.config.mlp_bias) == (True, True, False)
    expected = checkpoint_tensors(model)[1]["transformer.layers.1.attention.qkv.bias"]
    assert torch.equal(Converter(source)["transformer.layers.1.attention.qkv.bias"], expected.float())


def test_blocks_are_dequantized_and_the_notice_names_them(tmp_path):
    model = tiny_llama(3, **SIZES)
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model, block_type="Q8_0")))
    assert source.notices == ["dequantized tensors: 16 Q8_0; the source model is what they hold"]
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(source.tensor(name), dequantized(model.state_dict()[name].numpy(), "Q8_0"))


LINEAR, YARN = gguf.RopeScalingType.LINEAR, gguf.RopeScalingType.YARN


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({}, None),
        ({"rope_scaling_type": LINEAR, "rope_scaling_factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling_factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling_type": gguf.RopeScalingType.NONE, "rope_scaling_factor": 4.0}, None),
        (
            {"rope_scaling_type": YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope_scaling_type": YARN,
                "rope_scaling_factor": 2.0,
                "rope_scaling_orig_ctx_len": 256,
                "rope_scaling_yarn_beta_fast": 16.0,
                "rope_scaling_yarn_beta_slow": 2.0,
                "rope_scaling_yarn_ext_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_equals_that_of_config_json(tmp_path, metadata, scaling):
    source = open_source(str(write_gguf(tmp_path / "m.gguf", tiny_model("Qwen2ForCausalLM", 4, **SIZES), **metadata)))
    assert source.config.rotary_scaling == scaling
    model = tiny_model("Qwen2ForCausalLM", 4, **SIZES, rope_scaling=scaling)
    original = open_source(str(save_hf(model, tmp_path / "model")))
    for ours, theirs in zip(rope_tables(source.config, 300), rope_tables(original.config, 300), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_llama3_factors_are_recognised(tmp_path, monkeypatch):
    model = tiny_llama(4, **SIZES)
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(factors):
        def write(self):
            self.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
            original(self)

        monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write)

    # As in Llama 3: a factor for wavelengths above 8192 tokens, 1 below a quarter of that, a blend between.
    frequencies = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    for factor in (8.0, 20.0, 32.0):
        with_factors(1 / ((1 - smooth) / factor + smooth))
        source = open_source(str(write_gguf(tmp_path / "m.gguf", model)))
        assert source.config.rotary_scaling == LLAMA3 | {
            "factor": factor,
            "original_max_position_embeddings": 8192,
        }
    write_gguf(tmp_path / "both.gguf", model, rope_scaling_type=YARN, rope_scaling_factor=2.0)
    assert "both rope type 'yarn' and rope_freqs.weight" in refusal(tmp_path / "both.gguf")
    with_factors([1] * 8)
    assert open_source(str(write_gguf(tmp_path / "plain.gguf", model))).config.rotary_scaling is None
    with_factors([1, 1, 1, 1, 1, 1, 1, 3])
    write_gguf(tmp_path / "other.gguf", model)
    assert "rope_freqs.weight" in refusal(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "falcon"}, ["unknown architecture 'falcon'", "llama, qwen2, qwen3, pangu-embedded"]),
        ({"architecture": "qwen3moe"}, ["unknown architecture 'qwen3moe'"]),
        ({"architecture": "mistral3"}, ["unknown architecture 'mistral3'"]),
        ({"expert_count": 4}, ["expert_count = 4"]),
        ({"pre": "dbrx"}, ["pre-tokenizer", "dbrx", "smollm"]),
        ({"head_count_kv": [2, 1]}, ["m.gguf", "llama.attention.head_count_kv = [2, 1]", "layer by layer"]),
        ({"head_count_kv": 4}, ["m.gguf", "num_attention_heads 6", "num_key_value_heads 4"]),
        ({"rope_scaling_type": LINEAR, "rope_scaling_factor": 0.0}, ["m.gguf", "'factor'", "0.0"]),
        ({"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, ["unknown rope type 'longrope'", "yarn"]),
        ({"rope_scaling_type": YARN, "rope_scaling_factor": 0.0}, ["m.gguf", "'factor' of rope type 'yarn'"]),
        ({"rope_scaling_yarn_attn_factor": 1.0}, ["llama.rope.scaling.yarn_attn_factor = 1.0 is not supported"]),
        ({"rope_scaling_yarn_log_mul": 1.0}, ["llama.rope.scaling.yarn_log_multiplier = 1.0"]),
        ({"logit_scale": 0.5}, ["m.gguf", "llama.logit_scale = 0.5 is not supported"]),
        ({"value_length": 8}, ["llama.attention.value_length = 8", "allowed: 16"]),
        ({"rope_dimension_count": 8}, ["llama.rope.dimension_count = 8", "allowed: 16"]),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, options, words):
    message = refusal(write_gguf(tmp_path / "m.gguf", tiny_llama(5, **SIZES), **options))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "unexpected"), [("attn_q_norm", "self_attn.q_norm"), ("attn_sub_norm", "attn_sub_norm")]
)
def test_a_tensor_that_a_layer_would_leave_out_is_refused(tmp_path, monkeypatch, name, unexpected):
    original = gguf.GGUFWriter.write_header_to_file

    def write(self):
        self.add_tensor(f"blk.1.{name}.weight", np.ones(16, np.float32))
        original(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write)
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(3, **SIZES))
    assert f"unexpected model.layers.1.{unexpected}.weight [16], LlamaForCausalLM" in refusal(path)


def test_the_window_and_the_check_of_the_caller_count_before_the_tensor_table(tmp_path):
    model = tiny_llama(3, **SIZES)
    path = write_gguf(tmp_path / "m.gguf", model, sliding_window=32, head_count_kv=[2, 2])
    assert open_source(str(path)).config.sliding_window == 32
    assert open_source(str(write_gguf(tmp_path / "w.gguf", model, sliding_window=512))).config.sliding_window is None

    def check(config):
        raise QuasarError(f"window {config.sliding_window}")

    broken = write_gguf(tmp_path / "broken.gguf", model, sliding_window=32, feed_forward_length=3)
    assert "ffn" not in refusal(broken) and "mlp.down_proj" in refusal(broken)
    with pytest.raises(QuasarError, match="window 32"):
        open_source(str(broken), check=check)


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


TEXT = "I'Ll pay 1234€,  camelCase\n\n end"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'", "Ll", " pay", " 1234", "€,", " ", " camelCase", "\n\n", " end"]),
        ("smollm", ["I", "'", "Ll", " pay", " ", "1", "2", "3", "4", "€,", " ", " camelCase", "\n\n", " end"]),
        ("llama-bpe", ["I", "'Ll", " pay", " ", "123", "4", "€,", " ", " camelCase", "\n\n", " end"]),
        ("qwen2", ["I", "'Ll", " pay", " ", "1", "2", "3", "4", "€,", " ", " camelCase", "\n\n", " end"]),
        ("tekken", ["I", "'Ll", " pay", " ", "1", "2", "3", "4", "€,", " ", " camel", "Case", "\n\n", " end"]),
    ],
)
def test_the_named_pre_tokenizer_decides_about_words(tmp_path, pre, words):
    source = open_source(str(write_gguf(tmp_path / "m.gguf", tiny_llama(7, **SIZES), pre=pre)))
    source.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    bos = tokenizer.bos_token_id
    assert (encode(tokenizer, "a")[0] == bos) == (pre in ("llama-bpe", "tekken"))
    assert decode(tokenizer, encode(tokenizer, "a 12 é")) == "a 12 é"
    spans = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in spans] == words


def test_ids_of_a_qwen_vocabulary_equal_those_of_transformers(tmp_path):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([*TEXTS, TEXT] * 3, trainer)
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    merges = json.loads(trained.to_str())["model"]["merges"]
    (tmp_path / "vocab.json").write_text(json.dumps(trained.get_vocab()))
    (tmp_path / "merges.txt").write_text("".join(f"{' '.join(merge)}\n" for merge in merges))
    original = Qwen2TokenizerFast.from_pretrained(tmp_path)
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen2",
        "ggml.tokens": tokens,
        "ggml.merges": [" ".join(merge) for merge in merges],
    }
    rebuilt, _ = build_tokenizer(fields.get, "here")
    for text in [*TEXTS, TEXT, "e\u0301"]:  # a decomposed accent is composed first
        assert rebuilt.encode(text).ids == original(text)["input_ids"], text


def test_ids_of_a_sentencepiece_vocabulary_equal_its_own(tmp_path):
    save_sentencepiece(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    count = processor.get_piece_size()
    kinds = [2, 3, 3, *(6 if processor.is_byte(i) else 1 for i in range(3, count))]

    def tokenizer(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([processor.id_to_piece(i) for i in range(count)])
        writer.add_token_scores([processor.get_score(i) for i in range(count)])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_eos_token(True)

    model = tiny_model("PanguEmbeddedForCausalLM", 7, **SIZES | {"vocab_size": count})
    source = open_source(str(write_gguf(tmp_path / "m.gguf", model, tokenizer=tokenizer)))
    source.write_tokenizer(tmp_path)
    for text in TEXTS:
        assert encode(load_tokenizer(tmp_path), text) == [1, *processor.encode(text), 2], text


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
