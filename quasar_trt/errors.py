"""The exceptions a user meets, and the helper that names the nearest valid choice."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable


class QuasarError(Exception):
    """Bad input or an impossible request, told in one line.

    The message says what was wrong, the value, what is allowed and how to mend it. The CLI prints it without a
    traceback and exits with code 1.
    """


class RunnerBusy(QuasarError):
    """More requests than are allowed at a time; the same one can be made again later."""


class RequestFailed(QuasarError):
    """A request that was in order cannot go on."""


def unknown(kind: str, name: str, known: Iterable[str]) -> QuasarError:
    """The error for a name that is none of `known`, with the nearest one when there is one."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return QuasarError(f"unknown {kind} '{name}'; one of: {', '.join(known)}{hint}")


def named_options(kind: str):
    """Class decorator for frozen option dataclasses: an unknown keyword raises `QuasarError` naming the nearest field."""

    def decorate(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        generated = cls.__init__

        def __init__(self, *args, **kwargs):
            for name in kwargs:
                if name not in names:
                    raise unknown(kind, name, names)
            generated(self, *args, **kwargs)

        __init__.__wrapped__ = generated
        cls.__init__ = __init__
        return cls

    return decorate
