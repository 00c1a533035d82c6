"""Values on the command line: what is none of those allowed is a QuasarError that names the option, the value and what is allowed."""

from __future__ import annotations

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from quasar_trt.errors import QuasarError, unknown


class ValueType(click.ParamType, ABC):
    """Takes a text as what `read` makes of it."""

    allowed: str

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value  # a default
        try:
            return self.read(value)
        except (ValueError, OverflowError):
            raise QuasarError(f"{called(param)} is {reprlib.repr(value)}; allowed: {self.allowed}") from None

    @abstractmethod
    def read(self, text: str) -> object:
        """Raises ValueError or OverflowError for a text that is not `allowed`."""


class Whole(ValueType):
    """A whole number within bounds; without them, what takes it checks its range."""

    name = "integer"

    def __init__(self, least: int | None = None, most: int | None = None):
        self._least, self._most = least, most
        bounds = [f"{word} {bound}" for word, bound in (("of at least", least), ("at most", most)) if bound is not None]
        self.allowed = " ".join(["a whole number", ", ".join(bounds)]).rstrip()

    def read(self, text: str) -> int:
        number = int(text)
        if (self._least is not None and number < self._least) or (self._most is not None and number > self._most):
            raise ValueError
        return number


class Real(ValueType):
    """A number; what takes it checks its range."""

    name = "float"
    allowed = "a number"

    def read(self, text: str) -> float:
        return float(text)


class Numbers(ValueType):
    """Whole numbers, N,N,...; what takes them checks their range."""

    name = "n,n,..."
    allowed = "numbers with commas between them"

    def read(self, text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in text.split(","))


class Names(ValueType):
    """Names with commas between them; what takes them checks them."""

    name = "name,name,..."

    def read(self, text: str) -> tuple[str, ...]:
        return tuple(text.split(","))


class Bytes(ValueType):
    """A number of bytes, with K, M or G behind it for powers of 1024; what takes it checks its range."""

    name = "bytes"
    allowed = "bytes, or a number with K, M or G behind it"

    def read(self, text: str) -> int:
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
        return int(float(text[:-1]) * unit) if unit > 1 else int(text)


class TokenBias(ValueType):
    """ID=BIAS"""

    name = "id=bias"
    allowed = "ID=BIAS, a token id and a number"

    def read(self, text: str) -> tuple[int, float]:
        token, _, bias = text.partition("=")
        return int(token), float(bias)


class OptionPair(ValueType):
    """KEY=VALUE; the value is read as JSON where it is JSON (numbers, true, lists), else kept as text."""

    name = "key=value"
    allowed = "KEY=VALUE"

    def read(self, text: str) -> tuple[str, object]:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError
        try:
            return key.replace("-", "_"), json.loads(value)
        except ValueError:
            return key.replace("-", "_"), value


class Choice(click.Choice):
    """One of several names."""

    def convert(self, value, param, ctx):
        if value not in self.choices:
            raise unknown(called(param), value, self.choices)
        return value


class RegistryName(click.ParamType):
    """A name out of a registry that is imported only when it is needed; what looks the name up reports a wrong one."""

    name = "name"

    def __init__(self, load_names: Callable[[], Sequence[str]]):
        self.load_names = load_names

    def get_metavar(self, param, ctx=None):
        return f"[{'|'.join(self.load_names())}]"


class _Path(click.Path):
    def convert(self, value, param, ctx):
        if value == "":
            raise QuasarError(f"{called(param)} is ''; allowed: a path")
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


def called(param: click.Parameter) -> str:
    """An option or an argument as people write it."""
    return param.opts[0] if isinstance(param, click.Option) else param.human_readable_name


def read_text(option: str, path: Path) -> str:
    """The file that an option names. Raises QuasarError for one that cannot be read or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise QuasarError(f"{option}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise QuasarError(f"{option}: {path} is no UTF-8 text: {error}") from None
