"""From a sequence and the sampling of its request to a request of TensorRT-LLM's executor.

Read in TensorRT-LLM's source, executed nowhere yet. Where the executor means something else than this package by a parameter:

- A bias comes first, then temperature, then penalties. An additive penalty is therefore divided by the temperature:
  (logit - penalty) / temperature = logit / temperature - penalty / temperature.
- Presence and frequency are counted from `prompt_ignore_length` on, here from the end of the request's own prompt.
- min_tokens knows one end id. Here all of them are banned as bad words, and no request crosses the border.
- A draft without logits is accepted where it equals a sample, but what is emitted otherwise is another sample: at
  temperatures above 0 that favours the draft. With logits it is the ratio test, so there every draft has them.
- A row without a draft takes from the last token of a nucleus what exceeds top_p, a row with one keeps it whole. So that all
  rows sample alike, a sequence with top_p below 1 never comes without a draft.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from types import ModuleType

import torch

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.sequence_sampling import SequenceSampling
from quasar_trt.errors import QuasarError
from quasar_trt.sampling_params import SamplingParams

MAX_TOP_K = 1024  # more are cut to it, with a warning
# What q gives to a neighbour of the draft token d, hardly more than float32 can tell beside 1: with p(d) = q(d) = 1 the executor
# rejects d once in 2**25 draws, and then divides by an empty residual.
_DOUBT = 2.0**-22

_REFUSED = {
    "min_p": "its sampling of drafted rows knows none",
    "prompt_logprobs": "engines that take drafts give no logits of the prompt",
    "logits_processors": "its drafted rows pass none",
}
_DEFAULT = SamplingParams()


def check_params(executor: ModuleType, params: SamplingParams) -> None:
    """Raises QuasarError naming a parameter that the executor cannot apply to every row.

    executor: the module `tensorrt_llm.bindings.executor`.
    """
    refused = dict(_REFUSED)
    if not hasattr(executor.SamplingConfig, "prompt_ignore_length"):
        refused |= dict.fromkeys(("presence_penalty", "frequency_penalty"), "this version's count the prompt too")
    for name, why in refused.items():
        value, default = getattr(params, name), getattr(_DEFAULT, name)
        if value != default:
            raise QuasarError(f"{name} is {reprlib.repr(value)}; engine 'tensorrt_llm' allows none: {why}")
    if params.top_k > MAX_TOP_K:
        raise QuasarError(f"top_k is {params.top_k}; engine 'tensorrt_llm' allows at most {MAX_TOP_K}, or 0 for all")
    if params.allowed_token_ids is not None and (params.bad_words or params.min_tokens):
        raise QuasarError(
            "allowed_token_ids come with bad_words or min_tokens; engine 'tensorrt_llm' allows them alone: it could not tell "
            "when no token is left"
        )


def room(length: int, sampling: SequenceSampling) -> int:
    """Tokens behind `length` that are sampled alike: until min_tokens are there, or else all that the sequence may get."""
    border = sampling.num_prompt_tokens + sampling.params.min_tokens
    return (border if length < border else sampling.max_len) - length


def needs_draft(params: SamplingParams) -> bool:
    return not params.greedy and params.top_p < 1.0


class ExecutorRequests:
    """Makes the requests of one engine.

    executor: the module `tensorrt_llm.bindings.executor`. vocab_size, padded_vocab_size: of the model, and rows of its head on
    all ranks. The engine's logits are float32.
    """

    def __init__(self, executor: ModuleType, vocab_size: int, padded_vocab_size: int):
        self._executor = executor
        self._vocab_size = vocab_size
        self._padded_vocab_size = padded_vocab_size

    def make(self, context: Sequence[int], sampling: SequenceSampling, draft: Draft):
        """A request that verifies `draft` behind `context` once, or generates from there on where the draft is empty.

        It samples with the seed of its first position, and ends where the sequence does or may begin to end.
        """
        params, executor = sampling.params, self._executor
        early = len(context) - sampling.num_prompt_tokens < params.min_tokens
        bad_words = [list(word) for word in sampling.bad_words]
        if early:
            bad_words += [[token] for token in sampling.end_token_ids]
        # The executor leaves out an end id that it knows, and the row that it came from.
        ends = () if early or params.logprobs is not None else sampling.stop_token_ids
        return executor.Request(
            input_token_ids=list(context),
            max_tokens=len(draft) + 1 if draft else room(len(context), sampling),
            streaming=not draft,
            sampling_config=self._sampling_config(sampling, len(context)),
            output_config=executor.OutputConfig(
                return_generation_logits=params.logprobs is not None, exclude_input_from_output=True
            ),
            end_id=ends[0] if ends else None,
            bad_words=bad_words or None,
            embedding_bias=self._embedding_bias(params),
            external_draft_tokens_config=self._draft_config(draft, params) if draft else None,
        )

    def _sampling_config(self, sampling: SequenceSampling, position: int):
        params = sampling.params
        values: dict[str, object] = {"repetition_penalty": params.repetition_penalty}
        scale = 1.0
        if params.greedy:
            values["top_k"] = 1
        else:
            scale = params.temperature + 1e-6  # as it adds itself
            values |= {
                "temperature": params.temperature,
                "top_k": max(params.top_k, 0),
                "top_p": params.top_p,  # with neither it would be greedy
                "seed": sampling.seed(position),
            }
        if params.presence_penalty or params.frequency_penalty:
            values |= {
                "presence_penalty": params.presence_penalty / scale,
                "frequency_penalty": params.frequency_penalty / scale,
                "prompt_ignore_length": sampling.num_prompt_tokens,
            }
        return self._executor.SamplingConfig(**values)

    def _embedding_bias(self, params: SamplingParams) -> torch.Tensor | None:
        """What is added to the logits, [vocab_size] float32."""
        if not params.logit_bias and params.allowed_token_ids is None:
            return None
        bias = torch.zeros(self._vocab_size)
        bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            banned = torch.ones(self._vocab_size, dtype=torch.bool)
            banned[list(params.allowed_token_ids)] = False
            bias[banned] = torch.finfo(bias.dtype).min
        return bias

    def _draft_config(self, draft: Draft, params: SamplingParams):
        logits = None if params.greedy else self._draft_logits(draft)
        return self._executor.ExternalDraftTokensConfig(list(draft.ids), logits)

    def _draft_logits(self, draft: Draft) -> torch.Tensor:
        """Logits of the distributions that the draft tokens were drawn from, [draft tokens, padded_vocab_size] float32."""
        q = torch.zeros(len(draft), self._padded_vocab_size)
        rows, ids = torch.arange(len(draft)), torch.tensor(draft.ids)
        if draft.probs is None:
            q[rows, ids] = 1.0
        else:
            q[:, : self._vocab_size] = torch.from_numpy(draft.probs)
        q *= 1 - _DOUBT
        q[rows, (ids + 1) % self._vocab_size] += _DOUBT
        return q.log().clamp(min=torch.finfo(q.dtype).min)
