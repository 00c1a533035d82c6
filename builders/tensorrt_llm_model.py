"""Our decoder in TensorRT-LLM's own network: `trtllm-build --model_cls_file THIS_FILE --model_cls_name QuasarForCausalLM`.

It reads our checkpoints of every recipe but a rescored head. The quantized operations are the plugins of `quasar_trt.plugins`;
embedding, attention with its paged cache, and sums over ranks are TensorRT-LLM's. The residual stream is float32; what linears
and attention read and write, norms over heads and logits are BF16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tensorrt.plugin import op
from tensorrt_llm._common import default_trtnet
from tensorrt_llm._utils import get_sm_version, pad_vocab_size
from tensorrt_llm.functional import (
    _create_tensor,
    allgather,
    allreduce,
    cast,
    concat,
    constant,
    matmul,
    shape,
    silu,
    split,
)
from tensorrt_llm.layers import Attention, AttentionMaskType, ColumnLinear, Embedding, RmsNorm
from tensorrt_llm.models import MODEL_MAP
from tensorrt_llm.models.modeling_utils import DecoderLayerList, DecoderModelForCausalLM, QuantConfig
from tensorrt_llm.module import Module
from tensorrt_llm.parameter import Parameter

import quasar_trt.plugins.tensorrt  # noqa: F401 (registers the operations)
from quasar_trt.architectures import architecture_of
from quasar_trt.checkpoint import LAYER_PREFIX, OWN_ARCHITECTURE
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe

_DTYPE = "bfloat16"


def _plugin(operation: str, *inputs, **attributes) -> tuple:
    """The outputs of `quasar::operation`."""
    tensors = [tensor.trt_tensor for tensor in inputs]
    described = getattr(op.quasar, operation)(*tensors, **attributes, sm=get_sm_version())
    layer = default_trtnet().add_plugin(described, aot=True)
    return tuple(_create_tensor(layer.get_output(i), layer) for i in range(layer.num_outputs))


def _vector(values: np.ndarray):
    """A parameter's values as a constant [n]."""
    return constant(np.ascontiguousarray(values.reshape(-1)))


class _Model:
    """What the modules share: TensorRT-LLM's configuration, and what `quasar` of the checkpoint's config.json says."""

    def __init__(self, config):
        self.config = config
        self.tp_size = config.mapping.tp_size
        self.tp_group = config.mapping.tp_group
        self.sizes = ModelConfig.from_dict(config.quasar["model"])
        self.recipe = Recipe.from_dict(config.quasar["recipe"])
        self.hadamard: dict[str, int] = config.quasar["hadamard_blocks"]
        self.linears = {linear.name: linear for linear in architecture_of(self.sizes).linears}

    def linear(self, layer: int, name: str, then: Callable = lambda y: y) -> _Linear:
        quantized = self.recipe.quantizes(LAYER_PREFIX.format(i=layer) + name)
        return (_QuantizedLinear if quantized else _PlainLinear)(self, name, then)

    def norm(self, layer: int, name: str) -> Module:
        behind = next(linear.name for linear in self.linears.values() if linear.norm == name)
        if self.recipe.quantizes(LAYER_PREFIX.format(i=layer) + behind):
            return _QuantizedNorm(self)
        return _PlainNorm(self.sizes.hidden_size, eps=self.sizes.norm_epsilon, dtype=_DTYPE)


class _PlainNorm(RmsNorm):
    """RMSNorm of the residual stream, float32 -> BF16."""

    def forward(self, x):
        return super().forward(cast(x, _DTYPE))


class _QuantizedNorm(Module):
    """RMSNorm of the residual stream, float32 -> (codes, scale), its weight divided by the smoother."""

    def __init__(self, model: _Model):
        super().__init__()
        self._attributes = {"eps": model.sizes.norm_epsilon, "activations": model.recipe.activations}
        self.weight = Parameter(shape=(model.sizes.hidden_size,), dtype=_DTYPE)
        self.scale_to_int = Parameter(shape=(1,), dtype="float32")  # stock modules read it; it is 1

    def forward(self, x):
        return _plugin("rms_norm_quantize", x, self.weight.value, **self._attributes)


class _Linear(Module):
    """This rank's share of a linear.

    One that follows a norm reads what the norm gives and is split by rows. Another reads BF16 tensors, of which two stand for
    silu(first) * second, and is split by columns: its results are summed over the ranks, and then get the bias once.
    then: what happens to its results.
    """

    weight_dtype: str

    def __init__(self, model: _Model, name: str, then: Callable):
        super().__init__()
        linear = model.linears[name]
        self._by_columns = linear.norm is None
        self._tp_group = model.tp_group if model.tp_size > 1 else None
        self._then = then
        self._rows = linear.out_features(model.sizes) // (1 if self._by_columns else model.tp_size)
        self._columns = linear.in_features(model.sizes) // (model.tp_size if self._by_columns else 1)
        self.weight = Parameter(shape=(self._rows, self._columns), dtype=self.weight_dtype)
        self.bias = Parameter(shape=(self._rows,), dtype=_DTYPE) if linear.bias(model.sizes) else None

    def forward(self, x, lora_runtime_params=None, all_reduce_params=None):
        """x: a tensor, codes and scale, or a list of two tensors. Stock attention gives the other two to its linears: there is no
        LoRA, and no fusion of the sum over ranks to choose."""
        assert lora_runtime_params is None
        if not self._by_columns:
            return self._then(self.product(x, self.bias))
        y = self.product(self.read(*(x if isinstance(x, list) else [x])), None)
        if self._tp_group is not None:
            y = allreduce(y, self._tp_group)
        return self._then(y if self.bias is None else y + self.bias.value)


class _PlainLinear(_Linear):
    """BF16."""

    weight_dtype = _DTYPE

    def read(self, x, up=None):
        return x if up is None else silu(x) * up

    def product(self, x, bias: Parameter | None):
        y = matmul(x, self.weight.value, transb=True)
        return y if bias is None else y + bias.value


class _QuantizedLinear(_Linear):
    """INT8 weights; what it reads is smoothed, transformed and quantized per token."""

    weight_dtype = "int8"

    def __init__(self, model: _Model, name: str, then: Callable):
        super().__init__(model, name, then)
        self._activations = model.recipe.activations
        self._hadamard = model.hadamard.get(name, 0)
        self.per_channel_scale = Parameter(shape=(1, self._rows), dtype="float32")
        if self._by_columns:
            self.smoother = Parameter(shape=(1, self._columns), dtype="float32")

    def read(self, x, up=None):
        inverse = _vector(1.0 / self.smoother.raw_value)
        attributes = {"hadamard": self._hadamard, "activations": self._activations}
        if up is None:
            return _plugin("smooth_quantize", x, inverse, **attributes)
        return _plugin("silu_mul_smooth_quantize", x, up, inverse, **attributes)

    def product(self, x, bias: Parameter | None):
        tensors = [*x, self.weight.value, _vector(self.per_channel_scale.raw_value)]
        if bias is not None:
            tensors.append(bias.value)
        operation = "linear" if bias is None else "linear_bias"
        return _plugin(operation, *tensors, activations=self._activations, output=_DTYPE)[0]


class _Attention(Attention):
    """Stock attention between our linears, with norms over the heads of q and k where the architecture has them."""

    def __init__(self, model: _Model, layer: int):
        config = model.config
        super().__init__(
            local_layer_idx=layer,
            hidden_size=config.hidden_size,
            attention_head_size=config.head_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            dtype=_DTYPE,
            attention_mask_type=AttentionMaskType.causal,
            bias=False,
            position_embedding_type=config.position_embedding_type,
            rotary_embedding_base=config.rotary_base,
            rotary_embedding_scaling=config.rotary_scaling,
            tp_group=model.tp_group,
            tp_size=model.tp_size,
            tp_rank=config.mapping.tp_rank,
        )
        head_norms = architecture_of(model.sizes).head_norms
        self.qkv = model.linear(layer, "attention.qkv", *([self._norm_heads] if head_norms else []))
        self.dense = model.linear(layer, "attention.dense")
        for name in head_norms:
            norm = RmsNorm(config.head_size, eps=model.sizes.norm_epsilon, dtype=_DTYPE)
            setattr(self, name.removeprefix("attention."), norm)

    def _norm_heads(self, qkv):
        """[tokens, rows of q, k and v] with each head of q and of k normed; where stock attention would do it, it takes q, k and v
        for interleaved if there are as many heads of each."""
        heads = [self.num_attention_heads, self.num_attention_kv_heads, self.num_attention_kv_heads]
        size, tokens = self.attention_head_size, shape(qkv, 0)
        q, k, v = split(qkv.view(concat([tokens, sum(heads), size])), heads, dim=1)
        normed = concat([self.q_layernorm(q), self.k_layernorm(k), v], dim=1)
        return normed.view(concat([tokens, sum(heads) * size]))


class _Mlp(Module):
    """TensorRT-LLM calls the gate projection `fc` and the up projection `gate`."""

    def __init__(self, model: _Model, layer: int):
        super().__init__()
        self.fc = model.linear(layer, "mlp.fc")
        self.gate = model.linear(layer, "mlp.gate")
        self.proj = model.linear(layer, "mlp.proj")

    def forward(self, x):
        return self.proj([self.fc(x), self.gate(x)])


class _Layer(Module):
    """Residual stream float32 [tokens, hidden_size] -> the same."""

    def __init__(self, model: _Model, layer: int):
        super().__init__()
        self.input_layernorm = model.norm(layer, "input_layernorm")
        self.attention = _Attention(model, layer)
        self.post_layernorm = model.norm(layer, "post_layernorm")
        self.mlp = _Mlp(model, layer)

    def forward(self, hidden_states, use_cache=False, attention_mask=None, kv_cache_params=None, attention_params=None):
        attended = self.attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            use_cache=use_cache,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        attended, presents = attended if use_cache else (attended, None)
        x = hidden_states + cast(attended, "float32")
        x = x + cast(self.mlp(self.post_layernorm(x)), "float32")
        return (x, presents) if use_cache else x


class _Transformer(Module):
    """All but the head."""

    def __init__(self, model: _Model):
        super().__init__()
        config = model.config
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=_DTYPE)
        self.layers = DecoderLayerList(lambda config, layer: _Layer(model, layer), config)
        self.ln_f = _PlainNorm(config.hidden_size, eps=model.sizes.norm_epsilon, dtype=_DTYPE)

    def forward(self, input_ids, position_ids, use_cache, attention_mask, kv_cache_params, attention_params):
        x = self.layers.forward(
            cast(self.vocab_embedding(input_ids), "float32"),
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        x, presents = x if use_cache else (x, None)
        return (self.ln_f(x), presents) if use_cache else self.ln_f(x)


class _Int8Head(Module):
    """This rank's rows of an INT8 head, which reads activations of 16 bits."""

    def __init__(self, model: _Model, rows: int):
        super().__init__()
        self._tp_group = model.tp_group if model.tp_size > 1 else None
        self.weight = Parameter(shape=(rows, model.sizes.hidden_size), dtype="int8")
        self.per_channel_scale = Parameter(shape=(1, rows), dtype="float32")

    def forward(self, x):
        ones = constant(np.ones(self.weight.raw_value.shape[1], np.float32))
        q, scale = _plugin("smooth_quantize", x, ones, hadamard=0, activations=16)
        channels = _vector(self.per_channel_scale.raw_value)
        (y,) = _plugin("linear", q, scale, self.weight.value, channels, activations=16, output=_DTYPE)
        return y if self._tp_group is None else allgather(y, self._tp_group, gather_dim=-1)


class QuasarForCausalLM(DecoderModelForCausalLM):
    """config: TensorRT-LLM's PretrainedConfig of one of our checkpoints, its rank set."""

    def __init__(self, config):
        model = _Model(config)
        config.quantization = QuantConfig()  # TensorRT-LLM replaces no module of ours by one of its own
        rows = pad_vocab_size(config.vocab_size, model.tp_size)
        if model.recipe.lm_head == "int8":
            head = _Int8Head(model, rows // model.tp_size)
        else:
            groups = {"tp_group": model.tp_group, "tp_size": model.tp_size}
            head = ColumnLinear(config.hidden_size, rows, bias=False, dtype=_DTYPE, gather_output=True, **groups)
        super().__init__(config, _Transformer(model), head)


MODEL_MAP[OWN_ARCHITECTURE] = QuasarForCausalLM
