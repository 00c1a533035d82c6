"""Counts of one answer: OpenAI's, and what speculation did."""

from __future__ import annotations

from quasar_trt.metrics import SpeculationMetrics


def usage(num_prompt_tokens: int, metrics: SpeculationMetrics) -> dict[str, object]:
    """num_prompt_tokens: each prompt once, however many completions it has. metrics: over all completions."""
    emitted = metrics.num_emitted_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": emitted,
        "total_tokens": num_prompt_tokens + emitted,
        "speculation": {
            "num_verify_steps": metrics.num_verify_steps,
            "num_drafts": metrics.num_drafts,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
            "acceptance_rate": metrics.acceptance_rate,
            "mean_acceptance_length": metrics.mean_acceptance_length,
        },
    }
