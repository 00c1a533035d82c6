"""The text side of an engine directory: tokenizer.json, tokenizer_config.json, generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken

from quasar_trt.builders.sentencepiece_tokenizer import add_ends, read_tokenizer_model
from quasar_trt.errors import QuasarError
from quasar_trt.json_file import read_json
from quasar_trt.model_config import whole_number

# Any fast tokenizer can be loaded as this class, by every release of transformers: tokenizer.json holds all of it.
_CLASS = "PreTrainedTokenizerFast"
_COPIED = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json")
_CONVERTIBLE = ("tokenizer.model", "vocab.json")
# Settings that would have transformers run code, which an engine directory does not hold, or take another class.
_DROPPED = ("auto_map", "tokenizer_class")
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def write_json(path: Path, values: dict) -> None:
    """Raises ValueError for NaN and infinity, which JSON cannot hold."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def has_tokenizer(directory: Path, *, trust_remote_code: bool) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE)) or (
        trust_remote_code and _has_code(directory)
    )


def _has_code(directory: Path) -> bool:
    """Whether the checkpoint brings code for its tokenizer."""
    return "AutoTokenizer" in (_object(directory / "tokenizer_config.json").get("auto_map") or {})


def _object(path: Path) -> dict:
    """A JSON file that may be absent."""
    return read_json(path) if path.is_file() else {}


def copy_tokenizer(source: Path, directory: Path, *, trust_remote_code: bool) -> None:
    """The Hugging Face tokenizer in `source` as a tokenizer.json and its settings in `directory`.

    A tokenizer.json is copied, a tokenizer.model converted as data, anything else converted by transformers. With
    `trust_remote_code`, a tokenizer that comes with code of its own is what that code makes of it.

    Raises QuasarError for a tokenizer that cannot be converted, and for code that makes one without a fast form.
    """
    run_code = trust_remote_code and _has_code(source)
    if (source / "tokenizer.json").is_file() and not run_code:
        _copy(source, directory, _COPIED)
        values = _object(source / "tokenizer_config.json")
    elif (source / "tokenizer.model").is_file() and not run_code:
        _copy(source, directory, ("chat_template.jinja",))
        values = _convert_tokenizer_model(source, directory)
    else:
        values = _convert_by_transformers(source, directory, run_code)
    write_tokenizer_config(directory, {key: value for key, value in values.items() if key not in _DROPPED})


def _copy(source: Path, directory: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _convert_tokenizer_model(source: Path, directory: Path) -> dict:
    """Writes tokenizer.json; returns the settings that it does not hold."""
    config = _object(source / "special_tokens_map.json") | _object(source / "tokenizer_config.json")
    try:
        roles = {role: _token(config[role]).content for role in _ROLES if config.get(role) is not None}
        named = [*roles.values(), *(_token(token).content for token in config.get("additional_special_tokens") or [])]
        added = {int(i): _token(text) for text, i in _object(source / "added_tokens.json").items()}
        added |= {int(i): _token(token) for i, token in (config.get("added_tokens_decoder") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise QuasarError(
            f"the special tokens in {source} cannot be read; get an intact copy of the tokenizer"
        ) from None
    prefix = "first" if config.get("legacy") is False else "each"
    tokenizer = read_tokenizer_model(
        source / "tokenizer.model", added, prefix=None if config.get("add_prefix_space") is False else prefix
    )
    for token in dict.fromkeys(named):
        if tokenizer.token_to_id(token) is None:
            raise QuasarError(f"{source}: the special token '{token}' is not in its vocabulary")
        if token not in {other.content for other in added.values()}:
            tokenizer.add_special_tokens([_token(token)])
    bos = roles.get("bos_token") if config.get("add_bos_token", True) else None
    add_ends(tokenizer, bos, roles.get("eos_token") if config.get("add_eos_token") else None)
    tokenizer.save(str(directory / "tokenizer.json"))
    return roles | {key: config[key] for key in ("chat_template", "model_max_length") if config.get(key) is not None}


def _token(token: str | dict) -> AddedToken:
    """A token as these files spell it: its text, or an object with flags."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    flags = {key: token[key] for key in _FLAGS if key in token}
    return AddedToken(token["content"], **{"normalized": False} | flags)


def _convert_by_transformers(source: Path, directory: Path, run_code: bool) -> dict:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=run_code)
        tokenizer.save_pretrained(directory)
    except Exception as error:  # the tokenizers library raises plain Exception, remote code anything
        raise QuasarError(f"cannot convert the tokenizer in {source}: {one_line(error)}") from None
    if not (directory / "tokenizer.json").is_file():
        raise QuasarError(
            f"{type(tokenizer).__name__}, the tokenizer code in {source}, has no fast form (tokenizer.json); build without "
            "--trust-remote-code, which reads a tokenizer.model as data"
        )
    return read_json(directory / "tokenizer_config.json")


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
