"""What `quasar-trt generate` prints: completions as they come, and log probabilities after them."""

from __future__ import annotations

from collections.abc import Sequence

import click

from quasar_trt.decode_clock import DecodeClock
from quasar_trt.logprobs import Logprob
from quasar_trt.prompts import Prompt
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams


class Continuation:
    """Continues prompts on standard output; `clock` times the streams."""

    def __init__(self, runner: Runner, sampling_params: SamplingParams):
        self.clock = DecodeClock()
        self._runner = runner
        self._params = sampling_params

    def show(self, prompt: Prompt) -> None:
        """One completion streams. Several, and one whose prompt is scored, are printed when they are whole."""
        if self._params.n == 1 and self._params.prompt_logprobs is None:
            self._stream(prompt)
        else:
            self._print(prompt)

    def _stream(self, prompt: Prompt) -> None:
        num_tokens, finish_reason = 0, None
        logprobs: list[dict[int, Logprob]] = []
        for output in self.clock.time(self._runner.stream(prompt, self._params)):
            click.echo(output.text, nl=False)
            num_tokens, finish_reason = num_tokens + len(output.token_ids), output.finish_reason
            logprobs += output.logprobs or []
        click.echo()
        _print_logprobs(logprobs)
        self._note_limit(num_tokens, finish_reason)

    def _print(self, prompt: Prompt) -> None:
        (output,) = self._runner.generate([prompt], self._params)
        _print_logprobs(output.prompt_logprobs or ())
        for completion in output.outputs:
            if self._params.n > 1:
                click.echo(f"--- {completion.index + 1} of {self._params.n}")
            click.echo(completion.text)
            _print_logprobs(completion.logprobs or ())
            self._note_limit(len(completion.token_ids), completion.finish_reason)

    def _note_limit(self, num_tokens: int, finish_reason: str | None) -> None:
        if finish_reason == "length" and num_tokens != self._params.max_tokens:
            limit = self._runner.max_seq_len
            where = f"the engine's max_seq_len of {limit}"
            if limit < self._runner.engine.max_seq_len:
                where = f"the {limit} tokens that fit into --kv-cache-memory-bytes"
            click.echo(f"note: cut after {num_tokens} tokens, at {where}", err=True)


def _print_logprobs(entries: Sequence[dict[int, Logprob] | None]) -> None:
    """A line per token: itself, then the most probable ones, each as text, log probability and rank."""
    for entry in filter(None, entries):
        click.echo("\t".join(f"{each.decoded_token!r} {each.logprob:.4f} #{each.rank}" for each in entry.values()))
