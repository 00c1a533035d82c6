"""One prompt's completions on their way: what of them is new, and in the end the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import add

from quasar_trt.errors import RequestFailed
from quasar_trt.logprobs import Logprob, by_token
from quasar_trt.outputs import CompletionOutput, RequestOutput, StreamOutput
from quasar_trt.request import Request


class Generation:
    """What a runner makes of one prompt.

    requests: one for each completion.
    streams: whether the text is decoded as the tokens come.
    tokenizer: gives the tokenizer, or None where there is none; called when text is first needed.
    token_texts: texts of single tokens, as far as they are known; kept for all generations of a runner.
    """

    def __init__(
        self,
        requests: list[Request],
        streams: bool,
        tokenizer: Callable[[], object | None],
        token_texts: dict[int, str],
    ):
        self.requests = requests
        self._streams = streams
        self._tokenizer = tokenizer
        self._token_texts = token_texts
        self._told = {request: request.num_prompt_tokens for request in requests}  # ids; of those with more to tell

    @property
    def finished(self) -> bool:
        return all(request.finish_reason for request in self.requests)

    @property
    def has_news(self) -> bool:
        return any(len(request.context) > told or request.finish_reason for request, told in self._told.items())

    @property
    def is_told(self) -> bool:
        """Whether `pieces` has given everything there will be."""
        return not self._told

    def pieces(self) -> Iterator[StreamOutput]:
        """What is new since the last call, one piece for each completion that has advanced or ended.

        Raises RequestFailed when one has.
        """
        for request, told in list(self._told.items()):
            new = request.context[told:]
            self._told[request] += len(new)
            ended = request.finish_reason is not None
            if ended:
                del self._told[request]
            if new or (ended and not request.error):
                yield self._piece(request, new)
            if request.error:
                raise RequestFailed(request.error)

    def output(self) -> RequestOutput:
        """The answer, once all is finished."""
        first = self.requests[0]
        scored = None
        if first.params.prompt_logprobs is not None and not first.wants_whole_prompt:
            scored = [None, *(by_token(entry, self._token_text) for entry in first.prompt_logprobs)]
        return RequestOutput(
            first.id,
            first.prompt,
            first.context[: first.num_prompt_tokens],
            scored,
            [
                CompletionOutput(
                    request.sample_index,
                    request.token_ids,
                    request.finish_reason,
                    request.stop_reason,
                    self._logprobs(request),
                    partial(self._text, request),
                    request.origins,
                    request.text_offsets,
                )
                for request in self.requests
            ],
            reduce(add, [request.metrics for request in self.requests]),
            reduce(add, [request.service for request in self.requests]),
        )

    def _piece(self, request: Request, new: list[int]) -> StreamOutput:
        detokenizer = request.stop.detokenizer if self._streams else None
        first = len(request.token_ids) - len(new)
        return StreamOutput(
            detokenizer.say() if detokenizer else "",
            new,
            request.finish_reason,
            request.stop_reason,
            self._logprobs(request, first),
            request.sample_index,
            request.origins[first:],
            request.text_offsets[first:],
            request.metrics if request.finish_reason else None,
        )

    def _logprobs(self, request: Request, first: int = 0) -> list[dict[int, Logprob]] | None:
        """Of the emitted ids from the one of this index on."""
        if request.params.logprobs is None:
            return None
        return [by_token(entry, self._token_text) for entry in request.logprobs[first:]]

    def _text(self, request: Request) -> str:
        detokenizer = request.stop.detokenizer
        if detokenizer is None:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                return ""
            from quasar_trt.tokenizer import detokenizer_for

            detokenizer = detokenizer_for(tokenizer, request.params)
            for token in request.token_ids[:-1] if request.stop.ends_with_id else request.token_ids:
                detokenizer.push(token)
        detokenizer.end()
        return detokenizer.text

    def _token_text(self, token: int) -> str | None:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return None
        from quasar_trt.tokenizer import decode

        if token not in self._token_texts:
            self._token_texts[token] = decode(tokenizer, [token], skip_special_tokens=False)
        return self._token_texts[token]
