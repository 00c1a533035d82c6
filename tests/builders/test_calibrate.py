"""Calibration texts: what is read of a file, and what a model gets that does not write its own."""

from __future__ import annotations

import json

import pytest
from tiny_tokenizer import save_tokenizer

from quasar_trt.builders.calibrate import dataset_ids, read_dataset
from quasar_trt.errors import QuasarError
from quasar_trt.tokenizer import load_tokenizer


def test_a_line_ends_at_a_line_feed_only_and_a_byte_order_mark_is_no_text(tmp_path):
    separators = "one\u2028still one\x85\x0cand still"
    (tmp_path / "a.txt").write_bytes(f"\ufeff{separators}\r\ntwo\n".encode())
    assert read_dataset(tmp_path / "a.txt") == [separators, "two"]
    row = json.dumps({"text": "one\u2028still one"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{row}\n".encode())
    assert read_dataset(tmp_path / "a.jsonl") == ["one\u2028still one"]


def test_text_lines_and_every_json_field_are_read_and_blanks_skipped(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\n\n   \ntwo\n")
    assert read_dataset(text) == ["one", "two"]
    rows = [{"text": "a"}, {"prompt": "b"}, {"turns": ["c", "d"]}, {"text": " "}, {"other": "e"}, 7]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_dataset(lines) == ["a", "b", "c\nd"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\n \n", ["no usable text", "non-empty lines"]),
        ("a.jsonl", b'{"other": 1}\n', ["no usable text", "text, prompt, turns"]),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', ["line 2", "not JSON"]),
        ("a.csv", b"x", [".txt", ".jsonl"]),
        ("a.txt", b"\xff\xfe\xff", ["not UTF-8"]),
        ("a.txt", None, ["cannot read"]),
    ],
)
def test_unusable_files_are_named(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(QuasarError) as error:
        read_dataset(tmp_path / name)
    for word in [name, *words]:
        assert word in str(error.value)


def ids_of(path, *limits) -> list[list[int]]:
    return dataset_ids(path, read_dataset(path), *limits)


def test_over_long_texts_are_cut_and_only_the_first_are_used(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text("abcdef\nxy\nmore\n")
    ids = ids_of(tmp_path / "a.txt", load_tokenizer(tmp_path), 257, 2, 4)
    assert [len(text) for text in ids] == [4, 2]


def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "a.txt").write_text("ab\n")
    tokenizer = load_tokenizer(tmp_path)
    largest = max(tokenizer("ab")["input_ids"])
    assert ids_of(tmp_path / "a.txt", tokenizer, largest + 1, 1, 8) == [tokenizer("ab")["input_ids"]]
    with pytest.raises(QuasarError, match=f"a.txt has token id {largest}; allowed: 0 to {largest - 1}"):
        ids_of(tmp_path / "a.txt", tokenizer, largest, 1, 8)
