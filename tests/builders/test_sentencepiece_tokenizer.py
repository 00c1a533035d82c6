"""A tokenizer.model is read as data: its ids are those of SentencePiece itself, and the settings beside it hold."""

from __future__ import annotations

import json
import sys

import pytest
import sentencepiece
from tiny_tokenizer import TEXTS, save_sentencepiece

from quasar_trt.builders.tokenizer_files import copy_tokenizer
from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import decode, encode, encode_chat, load_tokenizer

CODE = """
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models

class OwnTokenizer({base}):
    def __init__(self, **kwargs):
        {own}
        super().__init__(**kwargs)

    vocab_size = 2

    def get_vocab(self):
        return {{"a": 0, "b": 1}}

    def save_vocabulary(self, *args, **kwargs):
        return ()
"""


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """transformers copies code that it runs to here, not into the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


def settings(directory, **values) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def converted(directory, trust_remote_code=False):
    out = directory.parent / "out"
    out.mkdir(exist_ok=True)
    copy_tokenizer(directory, out, trust_remote_code=trust_remote_code)
    return load_tokenizer(out)


def refusal(directory, **options) -> str:
    with pytest.raises(QuasarError) as error:
        converted(directory, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"byte_fallback": False},
        {"user_defined_symbols": ["[unused10]", "<think>"]},
        {"split_digits": True, "allow_whitespace_only_pieces": True},
    ],
)
def test_ids_equal_those_of_sentencepiece(model, options):
    save_sentencepiece(model, **options)
    settings(model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=False)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    tokenizer = converted(model)
    texts = [*TEXTS, *(f"{a}{b}" for a in TEXTS for b in TEXTS)]
    if "user_defined_symbols" in options:
        texts += [f"{a}[unused10]{b}<think>" for a in TEXTS for b in TEXTS]
    for text in texts:
        assert encode(tokenizer, text) == processor.encode(text), text
        if not options:  # nothing is lost but the difference between a space and its visible form
            assert decode(tokenizer, encode(tokenizer, text)) == text.replace("▁", " ")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_the_settings_beside_the_model_hold(model):
    save_sentencepiece(model, user_defined_symbols=["[unused9]", "[unused10]"])
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    first, second = (processor.piece_to_id(piece) for piece in ("[unused9]", "[unused10]"))
    template = "{% for m in messages %}[unused9]{{ m['role'] }}:{{ m['content'] }}[unused10]{% endfor %}"
    settings(
        model,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="[unused10]",
        added_tokens_decoder={
            str(second): {"content": "[unused10]", "special": True},
            str(first): {"content": "[unused9]", "special": True},
            str(len(processor)): {"content": "<new>", "special": False},
        },
        tokenizer_class="PanguTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_openpangu.PanguTokenizer", None]},
        chat_template=template,
        add_prefix_space=False,
    )
    tokenizer = converted(model)
    # BOS is SentencePiece's habit; no space comes before a text or behind an added token
    dog = [processor.piece_to_id(piece) for piece in processor.encode("x dog", out_type=str)[-1:]]
    bare = tokenizer(" dog", add_special_tokens=False)["input_ids"]
    assert bare == dog
    assert encode(tokenizer, " dog[unused9] dog<new> dog") == [1, *dog, first, *dog, len(processor), *dog]
    assert encode_chat(tokenizer, [{"role": "user", "content": "fox"}])[0] == first
    assert tokenizer.eos_token_id == second
    assert decode(tokenizer, [*dog, first, *dog, second]) == " dog dog"
    written = json.loads((model.parent / "out" / "tokenizer_config.json").read_text())
    assert written.keys() == {"tokenizer_class", "bos_token", "eos_token", "chat_template"}


@pytest.mark.parametrize(("legacy", "spaces"), [(None, 2), (True, 2), (False, 1)])
def test_a_space_precedes_each_stretch_or_only_the_text(model, legacy, spaces):
    save_sentencepiece(model)
    settings(model, added_tokens_decoder={"400": {"content": "<new>"}}, legacy=legacy)
    text = converted(model).convert_ids_to_tokens(encode(converted(model), "dog<new>dog"))
    assert "".join(text).count("▁") == spaces


def test_older_files_and_both_ends(model):
    save_sentencepiece(model, user_defined_symbols=["<turn>"])
    settings(model, eos_token="</s>", add_eos_token=True, additional_special_tokens=["<turn>"])
    (model / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<turn>"}))
    (model / "added_tokens.json").write_text(json.dumps({"<new>": 400}))
    tokenizer = converted(model)
    ids = encode(tokenizer, "dog<turn><new>")
    assert (ids[0], *ids[-3:]) == (1, tokenizer.convert_tokens_to_ids("<turn>"), 400, 2)
    assert decode(tokenizer, ids) == "dog"


def test_what_cannot_be_read_as_data_is_refused(model, monkeypatch):
    (model / "tokenizer.model").write_bytes(b"no such thing")
    assert "tokenizer.model is not a SentencePiece model" in refusal(model)
    save_sentencepiece(model, model_type="unigram", hard_vocab_limit=False)
    assert "type 1; only BPE" in refusal(model)
    save_sentencepiece(model)
    settings(model, added_tokens_decoder={"401": {"content": "<new>"}})
    assert "token '<new>' has id 400 by" in refusal(model)
    settings(model, eos_token="<end>")
    assert "the special token '<end>' is not in its vocabulary" in refusal(model)
    for values in ({"added_tokens_decoder": {"x": 1}}, {"bos_token": {"text": "<s>"}}):
        settings(model, **values)
        assert "the special tokens in" in refusal(model)
    settings(model)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    assert "pip install 'quasar-trt[sentencepiece]'" in refusal(model)


def own_code(directory, base: str, own: str) -> None:
    (directory / "tokenization_own.py").write_text(CODE.format(base=base, own=own))
    names = (
        ["tokenization_own.OwnTokenizer", None]
        if base == "PreTrainedTokenizer"
        else [None, "tokenization_own.OwnTokenizer"]
    )
    settings(directory, tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": names})


FAST = "kwargs['tokenizer_object'] = Tokenizer(models.BPE({'a': 0, 'b': 1}, []))"


def test_own_code_is_run_only_when_trusted(model):
    save_sentencepiece(model)
    own_code(model, "PreTrainedTokenizerFast", FAST)
    assert len(converted(model)) == 400
    assert not (model.parent / "out" / "tokenization_own.py").exists()
    trusted = converted(model, trust_remote_code=True)
    assert encode(trusted, "ab") == [0, 1]
    assert "auto_map" not in json.loads((model.parent / "out" / "tokenizer_config.json").read_text())


def test_own_code_without_a_fast_form_is_refused(model):
    save_sentencepiece(model)
    own_code(model, "PreTrainedTokenizer", "pass")
    message = refusal(model, trust_remote_code=True)
    assert "OwnTokenizer" in message and "no fast form" in message and "without --trust-remote-code" in message


def test_failing_code_gives_one_line(model):
    own_code(model, "PreTrainedTokenizerFast", "raise RuntimeError('broken\\ncode')")
    assert "cannot convert the tokenizer" in refusal(model, trust_remote_code=True)
