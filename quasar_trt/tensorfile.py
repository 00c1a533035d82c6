"""Safetensors files written tensor by tensor and mapped without a copy.

Both weight files of an engine directory, the checkpoint and the packed engine, are safetensors files. Ours differ from
those of the safetensors library only in that the header is padded (with spaces, as the format allows) so that the data
starts at a multiple of 64 bytes: a tensor whose size is a multiple of 64 is then aligned for vector loads when mapped.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quasar_trt.errors import QuasarError

ALIGNMENT = 64
# Header name -> numpy type. numpy has no bfloat16: its bits are mapped as uint16.
_DTYPES = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I8": np.dtype(np.int8),
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the header names it: dtype BF16, F16, F32 or I8, or in foreign files another one, of unknown size."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of all these tensors together."""
    return sum(spec.nbytes for spec in specs)


@dataclass(frozen=True)
class FileRecord:
    """What a manifest keeps of a weight file: bytes, sha256 of all of it and of its header alone."""

    size: int
    sha256: str
    header_sha256: str


class TensorWriter:
    """Writes tensors in the order of `specs`, one at a time, hashing as it goes.

    Use as a context manager. `close()` (or leaving the block without an error) raises ValueError when a tensor is missing;
    `record` then tells size and hashes.
    """

    def __init__(self, path: Path, specs: dict[str, TensorSpec], metadata: dict[str, str] | None = None):
        header: dict = {"__metadata__": metadata} if metadata else {}
        offset = 0
        for name, spec in specs.items():
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        self._pending = dict(specs)
        self._hash = hashlib.sha256()
        self._size = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close())
        self._append(len(text).to_bytes(8, "little") + text)
        self._header_sha256 = self._hash.hexdigest()
        self.record: FileRecord | None = None

    def _append(self, data) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def write(self, name: str, tensor) -> None:
        """`tensor`: a torch tensor or numpy array of exactly the declared dtype and shape (BF16: torch, or uint16 bits)."""
        expected = next(iter(self._pending), None)
        if name != expected:
            raise ValueError(f"tensor '{name}' written out of order; next is '{expected}'")
        spec = self._pending.pop(name)
        array = to_numpy(tensor)
        if array.dtype != _DTYPES[spec.dtype] or tuple(array.shape) != spec.shape:
            raise ValueError(f"tensor '{name}' is {array.dtype} {list(array.shape)}; declared {spec}")
        if array.nbytes:
            self._append(memoryview(np.ascontiguousarray(array)).cast("B"))

    def close(self) -> None:
        self._file.close()
        if self._pending:
            raise ValueError(f"tensors never written: {', '.join(self._pending)}")
        self.record = FileRecord(self._size, self._hash.hexdigest(), self._header_sha256)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def to_numpy(tensor) -> np.ndarray:
    """A torch tensor or numpy array as numpy; bfloat16 becomes uint16 bits."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch

    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def float32_of(tensor) -> np.ndarray:
    """A torch tensor or numpy array, of which uint16 are bits of bfloat16, as float32."""
    array = to_numpy(tensor)
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.astype(np.float32)


def read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, str], bytes]:
    """(specs, absolute byte offsets, metadata, raw header bytes) of a safetensors file.

    Raises QuasarError when the file is missing, is not safetensors, is shorter or longer than its header says, or when its
    tensors do not fill the data one after the other.
    """
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            size = os.fstat(file.fileno()).st_size
            if len(prefix) < 8 or length > size - 8:
                raise QuasarError(f"{path} is truncated: {size} bytes do not hold its header; copy or build it again")
            text = file.read(length)
    except OSError as error:
        raise QuasarError(f"cannot read {path}: {error.strerror}") from None
    try:
        specs, ranges, metadata = _parse_header(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise QuasarError(f"{path} is not a safetensors file: its header cannot be parsed") from None
    start = 8 + length
    end = 0
    for name, (begin, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        known = specs[name].dtype in _DTYPES
        if begin != end or stop < begin or (known and stop - begin != specs[name].nbytes):
            raise QuasarError(
                f"{path} is damaged: tensor '{name}', {specs[name]}, cannot lie at bytes {begin} to {stop} after byte {end}; copy or build it again"
            )
        end = stop
    if size < start + end:
        raise QuasarError(
            f"{path} is truncated: {size} bytes, its header promises {start + end}; copy or build it again"
        )
    if size > start + end:
        raise QuasarError(f"{path} has {size - start - end} bytes after its last tensor; copy or build it again")
    return specs, {name: start + begin for name, (begin, _) in ranges.items()}, metadata, prefix + text


def _parse_header(text: bytes) -> tuple[dict[str, TensorSpec], dict[str, tuple[int, int]], dict[str, str]]:
    """(specs, data offsets, metadata). Raises ValueError, KeyError, TypeError or AttributeError for what is no header."""
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("metadata must be strings")
    specs, ranges = {}, {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"])):
            raise TypeError(f"shape and data_offsets of {name} must be whole numbers")
        specs[name] = TensorSpec(str(entry["dtype"]), tuple(entry["shape"]))
        ranges[name] = (begin, end)
    return specs, ranges, metadata


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of the file as a read-only view of one memory map; BF16 appears as uint16 bits.

    The views keep the map alive. Raises as `read_header`, and for dtypes outside BF16, F16, F32, I8.
    """
    specs, offsets, _, _ = read_header(path)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {}
    for name, spec in specs.items():
        if spec.dtype not in _DTYPES:
            raise QuasarError(f"{path}: tensor '{name}' has dtype {spec.dtype}; allowed: {', '.join(_DTYPES)}")
        array = np.frombuffer(mapped, _DTYPES[spec.dtype], math.prod(spec.shape), offsets[name])
        tensors[name] = array.reshape(spec.shape)
    return tensors


def hash_file(path: Path, advance: Callable[[int], None]) -> str:
    """sha256 of the whole file; `advance` is told the bytes of each block that was read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
