"""Text to token ids and back in a thread of its own, so that a long prompt holds up neither the engine nor the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from quasar_trt import tokenizer as tokenization
from quasar_trt.errors import QuasarError


class Text:
    """tokenizer: nobody else may use it at the same time; None where there is none, and then every call raises QuasarError."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "quasar-trt text")

    async def encode(self, text: str) -> list[int]:
        return await self._do(tokenization.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], **options) -> list[int]:
        """Options as in `quasar_trt.tokenizer.chat_text`."""
        return await self._do(tokenization.encode_chat, messages, **options)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._do(tokenization.decode, ids, skip_special_tokens=False)

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Of each id alone."""
        return await self._do(lambda tokenizer: [tokenizer.decode([token]) for token in ids])

    async def _do(self, function, *args, **options):
        if self._tokenizer is None:
            raise QuasarError("this engine has no tokenizer; give prompts as token ids to /v1/completions")
        call = partial(function, self._tokenizer, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
