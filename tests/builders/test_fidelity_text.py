"""The windows that fidelity is measured on."""

from __future__ import annotations

import pytest
from stubs import ByteTokenizer

from quasar_trt.builders.fidelity_text import OWN_TEXT, fidelity_windows
from quasar_trt.errors import QuasarError


def test_the_package_s_own_text_serves_when_no_file_is_given():
    windows, described = fidelity_windows(ByteTokenizer(), 257, 2048)
    assert described == "the package's own text"
    assert b"".join(map(bytes, windows)).decode() == OWN_TEXT.read_text()
    assert {len(ids) for ids in windows[:-1]} == {512}


def test_a_file_is_cut_into_windows(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfabcdefghijk")  # with a byte order mark
    windows, described = fidelity_windows(ByteTokenizer(), 257, 2048, text=file, window=4)
    assert [bytes(ids).decode() for ids in windows] == ["abcd", "efgh", "ijk"]
    assert described == str(file)
    windows, _ = fidelity_windows(ByteTokenizer(), 257, 2048, text=file, window=4, tokens=9)
    assert [bytes(ids).decode() for ids in windows] == ["abcd", "efgh"]  # one id alone is followed by nothing


def test_windows_are_no_longer_than_the_engine_allows():
    windows, _ = fidelity_windows(ByteTokenizer(), 257, 100)
    assert max(map(len, windows)) == 100


def test_without_a_tokenizer_ids_are_random_but_always_the_same():
    windows, described = fidelity_windows(None, 131, 256)
    assert list(map(len, windows)) == [256] * 8
    assert min(map(min, windows)) >= 0 and 120 < max(map(max, windows)) < 131
    assert "random token ids (seed 0; the engine has no tokenizer)" in described
    assert windows == fidelity_windows(None, 131, 256)[0]
    assert fidelity_windows(None, 131, 256, tokens=100)[0] == [windows[0][:100]]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"abc", {"tokens": 10}, "has 3 tokens; at least 10 are needed"),
        (b"a", {}, "has 1 tokens; at least 2 are needed"),
        (b"", {}, "has 0 tokens"),
        (b"abc\xff", {}, "not UTF-8"),
        (None, {}, "cannot read text .*No such file"),
        (b"abc", {"window": 1}, "window is 1; this engine allows 2 to 64"),
        (b"abc", {"window": 65}, "window is 65"),
        (b"abc", {"tokens": 1}, "tokens is 1"),
        (b"abc", {"vocab_size": 99}, "token id 99; allowed: 0 to 98"),
        (b"abc", {"tokenizer": None}, "needs a tokenizer, and this engine has none"),
    ],
    ids=[
        "short",
        "one token",
        "empty",
        "not UTF-8",
        "missing",
        "window 1",
        "long window",
        "tokens 1",
        "foreign",
        "ids only",
    ],
)
def test_wrong_input_is_one_line(content, options, message, tmp_path):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    options = {"tokenizer": ByteTokenizer(), "vocab_size": 257} | options
    with pytest.raises(QuasarError, match=message) as caught:
        fidelity_windows(options.pop("tokenizer"), options.pop("vocab_size"), 64, text=file, **options)
    assert "\n" not in str(caught.value)
