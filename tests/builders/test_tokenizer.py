"""Exactly one BOS, whoever adds it; clear refusals."""

from __future__ import annotations

import json

import pytest
from tiny_tokenizer import save_tokenizer
from tokenizers import AddedToken, Tokenizer, processors

from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import decode, encode, encode_chat, load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def with_bos(tmp_path):
    """A tokenizer that puts <s> (257) before every text, with a chat template that does so too."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<s>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    return load_tokenizer(tmp_path)


def test_one_bos_before_raw_text_and_chat(with_bos):
    bos = with_bos.bos_token_id
    assert encode(with_bos, "hi").count(bos) == 1
    assert encode(with_bos, "<s>hi") == encode(with_bos, "hi")
    assert encode_chat(with_bos, MESSAGES) == encode(with_bos, "hi")


def test_text_survives_the_round_trip(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "a , b  é世🙂\n"
    assert decode(tokenizer, [*encode(tokenizer, text), tokenizer.eos_token_id]) == text


def test_the_template_shapes_a_chat(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert decode(tokenizer, encode_chat(tokenizer, MESSAGES)) == "user: hi\nassistant:"


def test_missing_files_and_templates_are_refused(tmp_path):
    with pytest.raises(QuasarError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = None
    with pytest.raises(QuasarError, match="no chat template"):
        encode_chat(tokenizer, MESSAGES)
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    with pytest.raises(QuasarError, match="system first"):
        encode_chat(tokenizer, MESSAGES)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(QuasarError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)
