"""Safetensors files: what is written is read, and a header that cannot be true is refused in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quasar_trt.errors import QuasarError
from quasar_trt.tensorfile import TensorSpec, TensorWriter, map_tensors, read_header


def raw(path, header: object, data: bytes = b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list, begin: object, end: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path) -> str:
    with pytest.raises(QuasarError) as error:
        read_header(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def test_written_tensors_are_read_by_both_sides(tmp_path):
    tensors = {
        "a": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "b": torch.tensor([-3, 7, 1], dtype=torch.int8),
    }
    specs = {"a": TensorSpec("BF16", (1, 2)), "empty": TensorSpec("F32", (0, 3)), "b": TensorSpec("I8", (3,))}
    path = tmp_path / "f.safetensors"
    with TensorWriter(path, specs, {"key": "value"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    found, offsets, metadata, _ = read_header(path)
    assert (found, metadata) == (specs, {"key": "value"})
    assert offsets["a"] % 64 == 0
    assert writer.record.size == path.stat().st_size
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(path).items())
    mapped = map_tensors(path)
    assert mapped["a"].dtype == np.uint16 and mapped["b"].tolist() == [-3, 7, 1] and mapped["empty"].shape == (0, 3)


def test_files_of_the_safetensors_library_are_read(tmp_path):
    save_file({"x": torch.zeros(2, 3), "y": torch.zeros(4, dtype=torch.int64)}, tmp_path / "f", {"format": "pt"})
    specs, _, metadata, _ = read_header(tmp_path / "f")
    assert specs == {"x": TensorSpec("F32", (2, 3)), "y": TensorSpec("I64", (4,))}
    assert metadata == {"format": "pt"}
    with pytest.raises(QuasarError, match="'y' has dtype I64"):
        map_tensors(tmp_path / "f")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (entry("F32", [2], -8, 0), ["cannot be parsed"]),
        (entry("F32", [2], 8, 0), ["'x'", "bytes 8 to 0"]),
        (entry("F32", [2], 0, 4), ["'x'", "F32 [2]", "bytes 0 to 4"]),
        (entry("F32", [2], 4, 12), ["'x'", "bytes 4 to 12 after byte 0"]),
        (entry("F32", [2**40, 2**40], 0, 0), ["'x'"]),
        (entry("F32", [-2], 0, 8), ["cannot be parsed"]),
        (entry("F32", ["2"], 0, 8), ["cannot be parsed"]),
        (entry("F32", [2], 0.0, 8), ["cannot be parsed"]),
        (entry("F32", [2], False, 8), ["cannot be parsed"]),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, ["cannot be parsed"]),
        ([], ["cannot be parsed"]),
    ],
)
def test_a_tensor_that_cannot_lie_there_is_refused(tmp_path, tensor, words):
    message = refusal(raw(tmp_path / "f", {"x": tensor}, bytes(8)))
    for word in words:
        assert word in message


@pytest.mark.parametrize(("begin", "end"), [(4, 12), (12, 20)])
def test_overlaps_and_gaps_are_refused(tmp_path, begin, end):
    header = {"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], begin, end)}
    assert "'y'" in refusal(raw(tmp_path / "f", header, bytes(end)))


@pytest.mark.parametrize(("size", "words"), [(7, "truncated"), (9, "1 bytes after its last tensor")])
def test_the_data_ends_with_the_last_tensor(tmp_path, size, words):
    assert words in refusal(raw(tmp_path / "f", {"x": entry("F32", [2], 0, 8)}, bytes(size)))


@pytest.mark.parametrize("header", [[], 3, {"__metadata__": "x"}, {"__metadata__": {"x": 1}}, {"x": 3}, b"{", b"\xff"])
def test_what_is_no_header_is_refused(tmp_path, header):
    assert "header cannot be parsed" in refusal(raw(tmp_path / "f", header))


def test_a_file_shorter_than_its_header_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"\x10\0\0")
    assert "truncated" in refusal(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"\xff" * 8 + b"{}")
    assert "truncated" in refusal(tmp_path / "f")
    assert "cannot read" in refusal(tmp_path / "absent")
