"""Benchmark prompts: a JSONL file, one object per line with "prompt", "turns" or "messages" and perhaps a "task"; or random ids."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from quasar_trt.errors import QuasarError


@dataclass(frozen=True)
class Prompt:
    """One prompt of a group of prompts of the same kind.

    messages: [{"role": ..., "content": ...}], as a chat template takes them.
    """

    task: str
    messages: tuple[dict[str, str], ...]

    @property
    def text(self) -> str:
        """The contents without the chat template."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as an engine reads it."""

    task: str
    ids: list[int]


RANDOM_TASK = "random ids"
_RANDOM_IDS = 128


def random_prompts(count: int, seed: int, vocab_size: int, max_seq_len: int) -> list[EncodedPrompt]:
    """Prompts of up to 128 ids, no id twice in one: text in which nothing can be looked up. At most half of max_seq_len long."""
    generator = random.Random(seed)
    length = min(_RANDOM_IDS, vocab_size, max_seq_len // 2)
    return [EncodedPrompt(RANDOM_TASK, generator.sample(range(vocab_size), length)) for _ in range(count)]


def load_prompts(path: Path, limit_per_task: int | None = None) -> list[Prompt]:
    """The file's prompts in order, at most `limit_per_task` of each task.

    Of "turns" only the first is used. Raises QuasarError naming the line that cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise QuasarError(f"cannot read prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise QuasarError(f"prompts {path} are not UTF-8 text; allowed: JSON Lines") from None
    lines = text.split("\n")  # not splitlines(): JSON strings may hold the other separators that it knows
    prompts = [_prompt(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise QuasarError(f"prompts {path} hold no line; allowed: JSON Lines with 'prompt', 'turns' or 'messages'")
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.task] += 1
        if limit_per_task is None or seen[prompt.task] <= limit_per_task:
            chosen.append(prompt)
    return chosen


def encode_prompts(prompts: list[Prompt], tokenizer, raw: bool, max_seq_len: int) -> list[EncodedPrompt]:
    """Through the tokenizer's chat template, or as they are where `raw`. Raises QuasarError for one that leaves no room for an answer."""
    from quasar_trt.tokenizer import encode, encode_chat

    ids = [encode(tokenizer, prompt.text) if raw else encode_chat(tokenizer, prompt.messages) for prompt in prompts]
    for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True), 1):
        if not 0 < len(tokens) < max_seq_len:
            raise QuasarError(
                f"prompt {number} (task {prompt.task}) has {len(tokens)} tokens; allowed: 1 to {max_seq_len - 1}, one "
                "less than max_seq_len; shorten it or build with a larger --max-seq-len"
            )
    return [EncodedPrompt(prompt.task, tokens) for prompt, tokens in zip(prompts, ids, strict=True)]


def _prompt(line: str, where: str) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise QuasarError(f"{where} is not JSON: {error}") from None
    match values:
        case {"messages": [_, *_] as messages} if all(_is_message(message) for message in messages):
            pass
        case {"turns": [str(text), *_]} | {"prompt": str(text)} if text:
            messages = [{"role": "user", "content": text}]
        case _:
            raise QuasarError(f"{where} holds no text under 'prompt', 'turns' or 'messages'")
    return Prompt(str(values.get("task", "prompts")), tuple(messages))


def _is_message(value) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
