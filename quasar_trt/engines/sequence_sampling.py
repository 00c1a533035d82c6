"""How the request behind a sequence samples: what an engine that accepts inside has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quasar_trt.sampling_params import SamplingParams


@dataclass(frozen=True)
class SequenceSampling:
    """It does not change while the request goes on.

    seed: position -> 64 bits of noise, for the generator of all that is sampled from there on.
    num_prompt_tokens, max_len: tokens of the prompt, and those of the sequence when max_tokens or the context ends it.
    end_token_ids: ids that are not emitted before params.min_tokens; stop_token_ids: those that end the request.
    bad_words: the ids of each.
    """

    params: SamplingParams
    seed: Callable[[int], int]
    num_prompt_tokens: int
    max_len: int
    end_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
