"""Log probabilities in the two shapes of OpenAI's API, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from quasar_trt.logprobs import Logprob

_LOWEST = -9999.0  # in place of minus infinity, which JSON has not; as OpenAI

Entry = dict[int, Logprob]  # of one position: its own token first, then the most probable ones


def completion_logprobs(
    token_ids: Sequence[int], entries: Iterable[Entry], offsets: Sequence[int]
) -> dict[str, list[object]]:
    """Of /v1/completions: parallel lists with one item per token.

    `top_logprobs` has the token itself too, also where it is none of the most probable ones; of tokens that read alike, the
    most probable counts. offsets: characters of the text before each token; empty where there is no text.
    """
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
    for token, entry in zip(token_ids, entries, strict=True):
        found["tokens"].append(_text(token, entry[token]))
        found["token_logprobs"].append(_value(entry[token]))
        ranked = sorted(entry.items(), key=lambda item: -item[1].rank)
        found["top_logprobs"].append({_text(each, logprob): _value(logprob) for each, logprob in ranked})
    return found


def echoed_logprobs(
    texts: Sequence[str], token_ids: Sequence[int], entries: Sequence[Entry | None]
) -> dict[str, list[object]]:
    """As `completion_logprobs`, of a prompt; nothing predicts its first token."""
    offsets = [0, *accumulate(map(len, texts))][:-1]
    found = completion_logprobs(token_ids[1:], entries[1:], ())
    none = {"tokens": texts[:1], "token_logprobs": [None], "top_logprobs": [None], "text_offset": offsets}
    return {name: none[name] + values for name, values in found.items()}


def chat_logprobs(token_ids: Sequence[int], entries: Iterable[Entry], count: int) -> dict[str, list[object]]:
    """Of /v1/chat/completions: each token with the `count` most probable ones."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        top = sorted((logprob.rank, each) for each, logprob in entry.items() if logprob.rank <= count)
        alternatives = [_chat_token(each, entry[each]) for _, each in top]
        content.append(_chat_token(token, entry[token]) | {"top_logprobs": alternatives})
    return {"content": content}


def prompt_logprobs(entries: Iterable[Entry | None]) -> list[dict[str, dict[str, object]] | None]:
    """As vLLM gives those of the prompt: None for its first token."""
    return [
        entry
        and {
            str(token): {"logprob": _value(each), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in entry.items()
        }
        for entry in entries
    ]


def _chat_token(token: int, logprob: Logprob) -> dict[str, object]:
    text = _text(token, logprob)
    # A token of half a character has no text of its own, and so no bytes that the text would tell.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _value(logprob), "bytes": known}


def _text(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, _LOWEST)
