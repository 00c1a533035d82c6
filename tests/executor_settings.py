"""What is given to and comes from the double of TensorRT-LLM's executor: the classes of its bindings that hold values.

Values out of range raise where they are made, with the exception that the bindings raise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

ModelType = enum.Enum("ModelType", "ENCODER_ONLY DECODER_ONLY ENCODER_DECODER")
FinishReason = enum.Enum("FinishReason", "NOT_FINISHED END_ID STOP_WORDS LENGTH TIMED_OUT CANCELLED")
BatchingType = enum.Enum("BatchingType", "STATIC INFLIGHT")
CommunicationType = enum.Enum("CommunicationType", "MPI")
CommunicationMode = enum.Enum("CommunicationMode", "LEADER ORCHESTRATOR")


def require(condition: bool, message: str) -> None:
    """TLLM_CHECK."""
    if not condition:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {message}")


@dataclass
class SamplingConfig:
    beam_width: int = 1
    top_k: int | None = field(default=None, kw_only=True)
    top_p: float | None = field(default=None, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)
    min_tokens: int | None = field(default=None, kw_only=True)
    repetition_penalty: float | None = field(default=None, kw_only=True)
    presence_penalty: float | None = field(default=None, kw_only=True)
    frequency_penalty: float | None = field(default=None, kw_only=True)
    prompt_ignore_length: int | None = field(default=None, kw_only=True)
    num_return_sequences: int | None = field(default=None, kw_only=True)
    min_p: float | None = field(default=None, kw_only=True)

    def __post_init__(self):
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise TypeError("__init__(): incompatible function arguments: seed is an unsigned 64-bit integer")
        for name in ("beam_width", "top_k", "min_tokens", "num_return_sequences"):
            if not isinstance(getattr(self, name), int | None):
                raise TypeError(f"__init__(): incompatible function arguments: {name} is an integer")
        require(self.beam_width >= 1, "beamWidth > 0")
        require(self.top_k is None or self.top_k >= 0, "topK.value() >= 0")
        require(self.top_p is None or 0 < self.top_p <= 1, "topP.value() > 0.f && topP.value() <= 1.f")
        require(self.temperature is None or self.temperature >= 0, "temperature.value() >= 0.f")
        require(self.min_tokens is None or self.min_tokens >= 0, "minTokens.value() >= 0")
        require(self.repetition_penalty is None or self.repetition_penalty > 0, "repetitionpenalty.value() > 0.f")
        require(self.num_return_sequences is None or self.num_return_sequences > 0, "numReturnSequences.value() > 0")
        require(self.min_p is None or 0 <= self.min_p <= 1, "minP.value() >= 0.f && minP.value() <= 1.0f")


@dataclass
class OutputConfig:
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False


@dataclass
class ExternalDraftTokensConfig:
    """logits: [draft tokens, padded vocabulary], of the engine's logits type."""

    tokens: list[int]
    logits: torch.Tensor | None = None
    acceptance_threshold: float | None = None
    fast_logits: bool | None = None

    def __post_init__(self):
        require(len(self.tokens) > 0, "!mTokens.empty()")
        if self.logits is not None:
            require(self.logits.ndim == 2, "mLogits.value().getShape().size() == 2")
            require(self.logits.shape[0] == len(self.tokens), "mLogits.value().getShape()[0] == mTokens.size()")
        if self.acceptance_threshold is not None:
            require(0 < self.acceptance_threshold <= 1, "acceptanceThreshold > 0.f && acceptanceThreshold <= 1.f")


@dataclass
class Request:
    input_token_ids: list[int]
    max_tokens: int
    streaming: bool = field(default=False, kw_only=True)
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig, kw_only=True)
    output_config: OutputConfig = field(default_factory=OutputConfig, kw_only=True)
    end_id: int | None = field(default=None, kw_only=True)
    pad_id: int | None = field(default=None, kw_only=True)
    bad_words: list[list[int]] | None = field(default=None, kw_only=True)
    stop_words: list[list[int]] | None = field(default=None, kw_only=True)
    embedding_bias: torch.Tensor | None = field(default=None, kw_only=True)
    external_draft_tokens_config: ExternalDraftTokensConfig | None = field(default=None, kw_only=True)
    client_id: int | None = field(default=None, kw_only=True)

    def __post_init__(self):
        for name in ("input_token_ids", "bad_words", "stop_words"):
            if not isinstance(getattr(self, name), list | None):
                raise TypeError(f"__init__(): incompatible function arguments: {name}")
        require(len(self.input_token_ids) > 0, "!mInputTokenIds.empty()")
        require(self.max_tokens > 0, "mMaxNewTokens > 0")


@dataclass
class KvCacheConfig:
    """The binding's own default of enable_block_reuse is True, ModelRunnerCpp's is False: who relies on it says so."""

    enable_block_reuse: bool = False
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None


@dataclass
class ParallelConfig:
    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: list[int] | None = None
    participant_ids: list[int] | None = None


@dataclass
class ExecutorConfig:
    max_beam_width: int = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig, kw_only=True)
    enable_chunked_context: bool = field(default=False, kw_only=True)
    batching_type: BatchingType = field(default=BatchingType.INFLIGHT, kw_only=True)
    max_batch_size: int | None = field(default=None, kw_only=True)
    max_num_tokens: int | None = field(default=None, kw_only=True)
    parallel_config: ParallelConfig | None = field(default=None, kw_only=True)
    max_queue_size: int | None = field(default=None, kw_only=True)
    gather_generation_logits: bool = field(default=False, kw_only=True)


@dataclass
class Result:
    """output_token_ids: [beam][token], the prompt first unless it was excluded; finish_reasons: [beam]."""

    is_final: bool
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    generation_logits: torch.Tensor | None = None


@dataclass
class Response:
    request_id: int
    error_msg: str | None = None
    _result: Result | None = None
    client_id: int | None = None

    def has_error(self) -> bool:
        return self.error_msg is not None

    @property
    def result(self) -> Result:
        require(not self.has_error(), f"request failed: {self.error_msg}")
        return self._result
