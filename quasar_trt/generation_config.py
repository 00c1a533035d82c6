"""What a model's generation_config.json says: end-of-sequence ids and defaults of sampling parameters."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.errors import QuasarError
from quasar_trt.sampling_params import SamplingParams

# name in the file -> sampling parameter; those that vLLM reads
_SAMPLING = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
_SAMPLING["max_new_tokens"] = "max_tokens"


@dataclass(frozen=True)
class GenerationConfig:
    """eos_token_ids: ids that end a request, the model's own first; None when the file does not say.

    sampling: the model's defaults, {sampling parameter: value}.
    """

    eos_token_ids: tuple[int, ...] | None
    sampling: dict[str, int | float]

    @classmethod
    def read(cls, engine_dir: Path) -> GenerationConfig:
        """Of an engine directory; empty when it has no such file.

        Raises QuasarError when the file is no JSON object or has a value that is not allowed.
        """
        path = Path(engine_dir) / "generation_config.json"
        if not path.is_file():
            return cls(None, {})
        try:
            values = json.loads(path.read_bytes())
            named = values.get("eos_token_id")
        except (ValueError, AttributeError):
            raise QuasarError(f"{path} is damaged: it is no JSON object; build the engine again") from None
        sampling = {ours: values[name] for name, ours in _SAMPLING.items() if values.get(name) is not None}
        try:
            params = SamplingParams(**sampling)
        except QuasarError as error:
            raise QuasarError(f"{path} is damaged: {error}; build the engine again") from None
        sampling = {name: getattr(params, name) for name in sampling}
        if named is None:
            return cls(None, sampling)
        ids = named if isinstance(named, list) else [named]
        if not all(type(token) is int for token in ids):
            raise QuasarError(
                f"{path} is damaged: eos_token_id is {reprlib.repr(named)}; allowed: an integer or a list of them; "
                "build the engine again"
            )
        return cls(tuple(ids), sampling)


def sampling_text(sampling: dict[str, object]) -> str:
    """For people: {"temperature": 0.6} -> "temperature 0.6"."""
    return ", ".join(f"{name} {value}" for name, value in sampling.items())
