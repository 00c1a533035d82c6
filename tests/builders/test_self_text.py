from __future__ import annotations

import pytest
import torch
from tiny import checkpoint_tensors, random_ids, save_hf, tiny_llama
from tiny_tokenizer import save_tokenizer

from quasar_trt.builders import self_text
from quasar_trt.builders.convert import Converter
from quasar_trt.builders.self_text import SelfText, new_texts, source_engine, write
from quasar_trt.builders.source import open_source
from quasar_trt.engines.reference import ReferenceEngine, ReferenceModel
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe
from quasar_trt.tokenizer import encode, load_tokenizer


@pytest.fixture(scope="module")
def engine():
    config, tensors = checkpoint_tensors(tiny_llama(0))
    return ReferenceEngine(ReferenceModel(config, Recipe("none"), tensors), max_seq_len=64, max_rows=7)


def written(engine, texts: list[SelfText]) -> list[list[int]]:
    write(engine, texts, lambda count: None)
    return [text.ids for text in texts]


def test_a_seed_decides_and_neighbours_do_not(engine):
    both = written(engine, new_texts(None, 131, 9, 20, 5))
    assert [len(ids) for ids in both] == [20] * 9
    assert written(engine, new_texts(None, 131, 9, 20, 5)) == both
    assert written(engine, new_texts(None, 131, 3, 20, 5)) == both[:3]
    assert written(engine, new_texts(None, 131, 9, 20, 6)) != both
    assert len({ids[0] for ids in both}) > 4


def test_starts_longer_than_a_pass_are_chunked(engine):
    text = new_texts(None, 131, 1, 40, 5)[0]
    text.ids[:] = random_ids(engine.config, 30)
    start = list(text.ids)
    assert written(engine, [text])[0][:30] == start and len(text.ids) == 40


def test_tokens_follow_the_models_distribution():
    """One step from a fixed token: 4,000 seeded draws against the softmax, within 0.03 for every token."""
    config, tensors = checkpoint_tensors(tiny_llama(1, vocab_size=5, num_hidden_layers=1))
    model = ReferenceModel(config, Recipe("none"), tensors)
    texts = new_texts(None, 5, 4000, 2, 11)
    for text in texts:
        text.ids[:] = [3]
    drawn = torch.tensor(written(ReferenceEngine(model, max_seq_len=2), texts))[:, 1]
    share = torch.bincount(drawn, minlength=5) / len(drawn)
    assert torch.allclose(share, model([3])[0].softmax(0), atol=0.03)


def test_every_other_text_opens_a_chat_message(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    texts = new_texts(tokenizer, 300, 4, 50, 0)
    opening = tokenizer("user: ")["input_ids"]
    assert [len(text.ids) for text in texts] == [1, len(opening) + 1] * 2
    assert texts[1].ids[:-1] == texts[3].ids[:-1] == opening
    assert all(text.ids[-1] < 256 for text in texts)  # neither the end token nor an id without a token


def test_an_opening_outside_of_the_vocabulary_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    largest = max(tokenizer("user: ")["input_ids"])
    with pytest.raises(QuasarError, match=f"token id {largest}; allowed: 0 to {largest - 1}"):
        new_texts(tokenizer, largest, 2, 50, 0)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_source_as_an_engine_writes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(self_text, "default_engine", lambda: name)
    model = tiny_llama(2)
    source = Converter(open_source(str(save_hf(model, tmp_path / "model"))))
    (tmp_path / "scratch").mkdir()
    with source_engine(source, 16, tmp_path / "scratch") as engine:
        assert engine.max_seq_len == 16
        assert any((tmp_path / "scratch").iterdir()) == (name == "cpu")
        found = written(engine, new_texts(None, 131, 2, 16, 0))
    assert list((tmp_path / "scratch").iterdir()) == []
    config, tensors = checkpoint_tensors(model)
    plain = ReferenceEngine(ReferenceModel(config, Recipe("none"), tensors), max_seq_len=16)
    assert found == written(plain, new_texts(None, 131, 2, 16, 0))


def test_a_template_that_refuses_a_single_user_message_gives_no_chat_beginnings(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ raise_exception('a system message comes first') }}"
    texts = new_texts(tokenizer, len(tokenizer), 4, 8, seed=0)
    assert [len(text.ids) for text in texts] == [1 + len(encode(tokenizer, ""))] * 4
