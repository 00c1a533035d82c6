"""The text side of an engine directory: tokenizer.json, tokenizer_config.json, generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quasar_trt.errors import QuasarError
from quasar_trt.model_config import whole_number

# Any fast tokenizer can be loaded as this class, by every release of transformers: tokenizer.json holds all of it.
_CLASS = "PreTrainedTokenizerFast"
_COPIED = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json")
_CONVERTIBLE = ("tokenizer.model", "vocab.json")


def read_json(path: Path) -> dict:
    """The file's object. Raises QuasarError naming the file when it cannot be read or is no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuasarError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise QuasarError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise QuasarError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values


def write_json(path: Path, values: dict) -> None:
    """Raises ValueError for NaN and infinity, which JSON cannot hold."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE))


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copies a Hugging Face tokenizer; one without a tokenizer.json is converted by transformers."""
    if (source / "tokenizer.json").is_file():
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        config = source / "tokenizer_config.json"
        values = read_json(config) if config.is_file() else {}
    else:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(source).save_pretrained(directory)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise QuasarError(f"cannot convert the tokenizer in {source}: {one_line(error)}") from None
        values = read_json(directory / "tokenizer_config.json")
    write_json(directory / "tokenizer_config.json", values | {"tokenizer_class": _CLASS})


def write_tokenizer_config(directory: Path, values: dict) -> None:
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": _CLASS} | values)


def one_line(error: Exception) -> str:
    """The message of another library's exception, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def eos_ids(values: dict, where: str) -> tuple[int, ...]:
    """`eos_token_id` of a config, a number, a list or absent, as a tuple. Raises QuasarError for anything else."""
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(whole_number(f"{where}: eos_token_id", i, least=0) for i in ids)


def write_generation_config(directory: Path, values: dict, eos_token_ids: tuple[int, ...]) -> None:
    """`values` with the end-of-text ids as a list; without any, readers fall back on the tokenizer's own."""
    ids = {"eos_token_id": list(eos_token_ids)} if eos_token_ids else {}
    write_json(directory / "generation_config.json", values | ids)
