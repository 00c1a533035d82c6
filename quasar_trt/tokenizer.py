"""Text to token ids and back, with the tokenizer of an engine directory.

transformers is imported when a tokenizer is loaded, torch never.
"""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quasar_trt.detokenizer import Detokenizer
from quasar_trt.errors import QuasarError
from quasar_trt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "developer", "user", "assistant", "tool")  # OpenAI's


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Raises QuasarError when the directory has no tokenizer or one that cannot be read."""
    directory = Path(directory)
    if not (directory / "tokenizer.json").is_file():
        raise QuasarError(f"{directory} has no tokenizer.json; give prompts as token ids, or build with a tokenizer")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about absent deep learning frameworks
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, clean_up_tokenization_spaces=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise QuasarError(f"cannot read the tokenizer in {directory}: {error}; build the engine again") from None


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a raw prompt, with the special tokens that the tokenizer adds; a BOS spelled in the text is not doubled.

    Raises QuasarError for text that UTF-8 cannot hold.
    """
    return _one_bos(tokenizer, tokenizer(_utf8(text))["input_ids"])


def check_ids(ids: Sequence[int], vocab_size: int, described: str) -> None:
    """Raises QuasarError when one of `ids`, those of the text `described`, is none of the model's."""
    if ids and max(ids) >= vocab_size:
        raise QuasarError(
            f"{described} has token id {max(ids)}; allowed: 0 to {vocab_size - 1}; the tokenizer is not this model's"
        )


def chat_text(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_values: Mapping[str, object] | None = None,
) -> str:
    """`messages` through the chat template.

    continue_final_message: leave the last message open, for the model to go on with it.
    template_values: what the template may read besides, such as enable_thinking.

    Raises QuasarError for messages that are not a list of {"role": one of ROLES, "content": text}, when there is no template,
    and when it objects or leaves a message out, as many do with roles that they do not know.
    """
    _check_messages(messages)
    if not tokenizer.chat_template:
        raise QuasarError("this model has no chat template; give the prompt as plain text")
    values = dict(template_values or {})
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if names := [name for name in values if name in own]:
        raise QuasarError(
            f"a chat template cannot be given '{names[0]}'; allowed: names that the template itself reads"
        )
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **values,
    )
    # Of the contents themselves a template may strip or escape something.
    marks = [message["content"] and f"mark{i}of{len(messages)}" for i, message in enumerate(messages)]
    try:
        text = render(list(messages))
        marked = render([{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)])
    except Exception as error:  # a template is a program of the model's, and its own errors are not the only ones
        raise QuasarError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from None
    for message, mark in zip(messages, marks, strict=True):
        if mark not in marked:
            raise QuasarError(
                f"messages has role '{message['role']}' where this model's chat template leaves it out; use another, such as "
                "'system' or 'user'"
            )
    return text


def encode_chat(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, str]], **options) -> list[int]:
    """Ids of a chat prompt; options and errors as in `chat_text`. The template alone decides about special tokens, so it
    gives at most one BOS."""
    text = chat_text(tokenizer, messages, **options)
    return _one_bos(tokenizer, tokenizer(_utf8(text), add_special_tokens=False)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def detokenizer_for(tokenizer: PreTrainedTokenizerFast, params: SamplingParams) -> Detokenizer:
    """One for a completion with these parameters."""
    decode_all = partial(decode, tokenizer, skip_special_tokens=params.skip_special_tokens)
    return Detokenizer(decode_all, params.stop, params.include_stop_str_in_output)


def bad_word_ids(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> list[list[int]]:
    """The ids of each word as it stands at the beginning of a text and inside of one, after a space.

    The second form counts when the space changes the first token and not the number of tokens, as vLLM has it.
    Raises QuasarError for a word that has no tokens.
    """
    found = []
    for word in words:
        alone, after_space = (
            tokenizer(_utf8(space + word.lstrip()), add_special_tokens=False)["input_ids"] for space in ("", " ")
        )
        if not alone:
            raise QuasarError(f"bad_words has {word!r}, which the tokenizer gives no token; leave it out")
        found.append(alone)
        if len(after_space) == len(alone) and after_space[0] != alone[0]:
            found.append(after_space)
    return found


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    allowed = '{"role": text, "content": text}'
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise QuasarError(f"messages is {reprlib.repr(messages)}; allowed: a list of at least one {allowed}")
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise QuasarError(f"a message is {reprlib.repr(message)}; allowed: {allowed}")
        if message["role"] not in ROLES:
            raise QuasarError(f"messages has role {message['role']!r}; allowed: {', '.join(ROLES)}")


def _utf8(text: str) -> str:
    """`text` as it is. Raises QuasarError when it has half of a surrogate pair, as badly decoded input does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QuasarError(
            f"the text has {text[error.start]!r} at character {error.start}; allowed: what UTF-8 can hold; "
            "was it read with another encoding?"
        ) from None
    return text


def _one_bos(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids
