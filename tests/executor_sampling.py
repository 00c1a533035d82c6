"""Sampling in the double of TensorRT-LLM's executor: one row of logits, one request's settings."""

from __future__ import annotations

import numpy as np
from executor_settings import Request


def distribution(request: Request, ids: list[int], logits: np.ndarray) -> np.ndarray:
    """p [vocab] float64 of the token after `ids` (prompt and output): bias, temperature, penalties, top-k, then top-p."""
    sampling = request.sampling_config
    logits = logits.astype(np.float64)
    if request.embedding_bias is not None:
        logits += request.embedding_bias.numpy()
    logits /= sampling.temperature or 1
    counts = np.bincount(ids, minlength=len(logits))
    if sampling.repetition_penalty:
        penalty = np.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits = np.where(counts > 0, logits * penalty, logits)
    counts = np.bincount(ids[sampling.prompt_ignore_length or 0 :], minlength=len(logits))
    logits -= (sampling.presence_penalty or 0) * (counts > 0) + (sampling.frequency_penalty or 0) * counts
    if (
        request.end_id is not None
        and 0 <= request.end_id < len(logits)
        and len(ids) - len(request.input_token_ids) < (sampling.min_tokens or 0)
    ):
        logits[request.end_id] = -np.inf
    for word in request.bad_words or ():
        if ids[len(ids) - len(word) + 1 :] == word[:-1]:
            logits[word[-1]] = -np.inf
    top_k, top_p = sampling.top_k or 0, sampling.top_p or 0
    if sampling.temperature == 0 or (not top_k and not top_p):
        top_k = 1
    best = np.argsort(-logits, kind="stable")  # of equal logits the lower id
    if top_k:
        logits[best[top_k:]] = -np.inf
    p = np.exp(logits - logits[best[0]])
    p[p < (sampling.min_p or 0)] = 0
    p /= p.sum()
    if 0 < top_p < 1:
        cumulative = np.cumsum(p[best])
        count = int(np.searchsorted(cumulative, top_p)) + 1
        p[best[count:]] = 0
        if request.external_draft_tokens_config is None:
            p[best[count - 1]] -= max(cumulative[count - 1] - top_p, 0)
    return p / p.sum()


def draw(p: np.ndarray, generator: np.random.Generator) -> int:
    return int(generator.choice(len(p), p=p / p.sum()))
