"""The modules `tensorrt` and `tensorrt_rtx`, which have the same API, and what they say when something fails."""

from __future__ import annotations

import importlib
from types import ModuleType

from quasar_trt.errors import QuasarError
from quasar_trt.machine import missing, version_of


def load_stack(stack: str) -> ModuleType:
    """The module of the distribution `stack`. Raises QuasarError with the line that installs it."""
    try:
        return importlib.import_module(stack.replace("-", "_"))
    except ImportError as error:
        why = f"it cannot be imported: {error}" if version_of(stack) else missing(stack)
        raise QuasarError(f"the package {stack} is needed: {why}") from None


def quiet_logger(trt: ModuleType):
    """A logger for TensorRT that prints nothing; its `first_error` since the last `forget()` is the reason of a failure."""

    class QuietLogger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)
            self.forget()

        def forget(self) -> None:
            self._errors: list[str] = []

        def log(self, severity, message):
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self._errors.append(" ".join(message.split()))

        @property
        def first_error(self) -> str:
            """TensorRT tells a failure several times, the first time in the best words."""
            return self._errors[0] if self._errors else "TensorRT gave no reason"

    return QuietLogger()
