"""Functions and layers of the double of `tensorrt_llm`, computed at once in torch; types are as strict as in a strongly typed network."""

from __future__ import annotations

import enum
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional

from quasar_trt.model_config import ModelConfig
from quasar_trt.plugins import reference as ops
from quasar_trt.rope import rope_tables

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
_here = threading.local()


class World:
    """Ranks as threads that wait for each other; without one a sum over ranks is this rank's part alone."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size, timeout=20)
        self._parts: dict[int, torch.Tensor] = {}

    @contextmanager
    def rank(self, rank: int):
        _here.world, _here.number = self, rank
        try:
            yield
        finally:
            _here.world = None

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[_here.number] = part
        self._barrier.wait()
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        self._barrier.wait()
        return parts


class Tensor:
    def __init__(self, trt_tensor: torch.Tensor, producer):
        self.trt_tensor = trt_tensor
        self.producer = producer

    @property
    def dtype(self) -> torch.dtype:
        return self.trt_tensor.dtype

    def ndim(self) -> int:
        return self.trt_tensor.ndim

    def view(self, shape: tuple[int, ...]) -> Tensor:
        return create_tensor(self.trt_tensor.reshape(shape), None)

    def __add__(self, other: Tensor) -> Tensor:
        return _elementwise(torch.add, self, other)

    def __mul__(self, other: Tensor) -> Tensor:
        return _elementwise(torch.mul, self, other)


def create_tensor(trt_tensor: torch.Tensor, producer) -> Tensor:
    assert isinstance(trt_tensor, torch.Tensor)
    return Tensor(trt_tensor, producer)


def _elementwise(operation, x: Tensor, y: Tensor) -> Tensor:
    assert x.dtype == y.dtype, f"{x.dtype} and {y.dtype} meet"
    return create_tensor(operation(x.trt_tensor, y.trt_tensor), None)


def cast(x: Tensor, dtype: str) -> Tensor:
    return create_tensor(x.trt_tensor.to(_DTYPES[dtype]), None)


def constant(values: np.ndarray) -> Tensor:
    assert values.flags.c_contiguous
    return create_tensor(torch.from_numpy(values), None)


def matmul(x: Tensor, y: Tensor, transa: bool = False, transb: bool = False) -> Tensor:
    assert x.dtype == y.dtype == torch.bfloat16
    x, y = x.trt_tensor.float(), y.trt_tensor.float()
    return create_tensor(((x.mT if transa else x) @ (y.mT if transb else y)).bfloat16(), None)


def silu(x: Tensor) -> Tensor:
    return create_tensor(functional.silu(x.trt_tensor), None)


def shape(x: Tensor, dim: int) -> int:
    return x.trt_tensor.shape[dim]


def concat(inputs, dim: int = 0):
    """Of tensors, or of sizes to one shape."""
    if not any(isinstance(part, Tensor) for part in inputs):
        return tuple(inputs)
    assert len({part.dtype for part in inputs}) == 1
    return create_tensor(torch.cat([part.trt_tensor for part in inputs], dim), None)


def split(x: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    return [create_tensor(part, None) for part in x.trt_tensor.split(sizes, dim)]


def allreduce(x: Tensor, group: list[int]) -> Tensor:
    """The plugin sums in the model's type alone."""
    assert x.dtype == torch.bfloat16 and len(group) > 1
    world = getattr(_here, "world", None)
    return x if world is None else create_tensor(sum(world.gather(x.trt_tensor)), None)


def allgather(x: Tensor, group: list[int], gather_dim: int = 0) -> Tensor:
    assert x.dtype == torch.bfloat16 and len(group) > 1
    world = getattr(_here, "world", None)
    parts = [x.trt_tensor] * len(group) if world is None else world.gather(x.trt_tensor)
    return create_tensor(torch.cat(parts, gather_dim), None)


class _Operations:
    """`tensorrt.plugin.op.quasar`: describes a layer, as (name, inputs, attributes)."""

    def __getattr__(self, name: str):
        assert name in ("smooth_quantize", "silu_mul_smooth_quantize", "rms_norm_quantize", "linear", "linear_bias")
        return lambda *inputs, **attributes: (name, inputs, attributes)


def add_plugin(described, aot: bool):
    """A layer of `quasar_trt.plugins.tensorrt`, its types as the plugin takes them; 16-bit codes are INT8 in pairs."""
    assert aot
    name, inputs, attributes = described
    assert attributes.pop("sm") >= 80
    bits = attributes.pop("activations")
    if name.startswith("linear"):
        codes, scale, weight, weight_scale, *bias = inputs
        assert [x.dtype for x in inputs[:4]] == [torch.int8, torch.float32, torch.int8, torch.float32]
        assert weight_scale.ndim == 1 and len(bias) == (name == "linear_bias")
        codes = codes if bits == 8 else codes.view(torch.int16)
        outputs = [ops.LINEAR[bits](codes, scale, weight, weight_scale, *bias).to(_DTYPES[attributes.pop("output")])]
    elif name == "rms_norm_quantize":
        x, weight = inputs
        codes, scale = ops.rms_norm_quantize(x, weight, attributes.pop("eps"), bits)
        outputs = [codes.view(torch.int8), scale]
    else:
        assert inputs[-1].dtype is torch.float32 and inputs[-1].ndim == 1
        codes, scale = getattr(ops, name)(*inputs, attributes.pop("hadamard"), bits)
        outputs = [codes.view(torch.int8), scale]
    assert not attributes
    return SimpleNamespace(num_outputs=len(outputs), get_output=lambda i: outputs[i])


class Module:
    def __init__(self):
        self.__dict__.update(_modules={}, _parameters={})

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str):
        for members in (self.__dict__["_parameters"], self.__dict__["_modules"]):
            if name in members:
                return members[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value) -> None:
        if isinstance(value, Parameter | Module):
            self.__dict__.pop(name, None)
            (self._parameters if isinstance(value, Parameter) else self._modules)[name] = value
        else:
            self.__dict__[name] = value

    def named_parameters(self, prefix: str = ""):
        for name, parameter in self._parameters.items():
            yield prefix + name, parameter
        for name, module in self._modules.items():
            yield from module.named_parameters(f"{prefix}{name}.")


class Parameter:
    def __init__(self, value=None, shape: tuple[int, ...] | None = None, dtype: str | None = None):
        self._value, self._shape, self._dtype = value, tuple(shape), _DTYPES[dtype]

    def is_inited(self) -> bool:
        return self._value is not None

    @property
    def value(self) -> Tensor:
        return create_tensor(self._value, None)

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        assert tuple(value.shape) == self._shape, f"updated {tuple(value.shape)}, original {self._shape}"
        assert value.dtype == self._dtype, f"initialized as {self._dtype} but set to {value.dtype}"
        self._value = value

    @property
    def raw_value(self) -> np.ndarray:
        return self._value.numpy()


class RmsNorm(Module):
    def __init__(
        self, normalized_shape: int, eps: float = 1e-6, elementwise_affine: bool = True, dtype: str | None = None
    ):
        super().__init__()
        self.weight = Parameter(shape=(normalized_shape,), dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, normalized_shape=None) -> Tensor:
        assert x.dtype == self.weight.value.dtype
        y = ops.rms_norm(x.trt_tensor, self.weight.value.trt_tensor, self.eps)
        return create_tensor(y.to(x.dtype), None)


class Embedding(Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: str | None = None):
        super().__init__()
        self.weight = Parameter(shape=(num_embeddings, embedding_dim), dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return create_tensor(self.weight.value.trt_tensor[ids.trt_tensor], None)


class ColumnLinear(Module):
    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        dtype=None,
        tp_group=None,
        tp_size=1,
        gather_output=True,
        is_qkv=False,
    ):
        super().__init__()
        self.weight = Parameter(shape=(out_features // tp_size, in_features), dtype=dtype)
        assert not bias
        self._gathers, self._group = gather_output and tp_size > 1, tp_group

    def forward(self, x: Tensor, lora_runtime_params=None) -> Tensor:
        y = matmul(x, self.weight.value, transb=True)
        return allgather(y, self._group, gather_dim=-1) if self._gathers else y


class AttentionMaskType(enum.Enum):
    padding, causal = range(2)


class Attention(Module):
    """What the real one does with a packed prompt: its `qkv`, causal attention with RoPE, its `dense`."""

    def __init__(
        self,
        *,
        local_layer_idx,
        hidden_size,
        num_attention_heads,
        num_kv_heads=None,
        max_position_embeddings=1024,
        attention_head_size=None,
        qk_layernorm=False,
        attention_mask_type=AttentionMaskType.padding,
        bias=True,
        dtype=None,
        position_embedding_type=None,
        rotary_embedding_base=10000.0,
        rotary_embedding_scaling=None,
        tp_group=None,
        tp_size=1,
        tp_rank=0,
    ):
        super().__init__()
        assert attention_mask_type is AttentionMaskType.causal and position_embedding_type == "rope_gpt_neox"
        self.attention_head_size = attention_head_size or hidden_size // num_attention_heads
        self.num_attention_heads = num_attention_heads // tp_size
        self.num_attention_kv_heads = num_kv_heads // tp_size
        self.rotary = (rotary_embedding_base, rotary_embedding_scaling)
        rows = (num_attention_heads + 2 * num_kv_heads) * self.attention_head_size
        self.qkv = ColumnLinear(
            hidden_size,
            rows,
            bias=bias,
            dtype=dtype,
            tp_group=tp_group,
            tp_size=tp_size,
            gather_output=False,
            is_qkv=True,
        )
        self.dense = ColumnLinear(1, 1, bias=False, dtype=dtype)  # a RowLinear in the real one

    def forward(
        self, hidden_states, attention_mask=None, use_cache=False, kv_cache_params=None, attention_params=None,
        lora_layer_params=None, all_reduce_params=None,
    ):  # fmt: skip
        assert isinstance(hidden_states, Tensor | tuple)
        qkv = self.qkv(hidden_states, None)
        assert qkv.ndim() == 2 and qkv.dtype is torch.bfloat16
        context = self._attend(qkv.trt_tensor.float(), attention_params.config)
        context = self.dense(
            create_tensor(context.bfloat16(), None), lora_runtime_params=None, all_reduce_params=all_reduce_params
        )
        return (context, "present") if use_cache else context

    def _attend(self, qkv: torch.Tensor, config) -> torch.Tensor:
        size, tokens = self.attention_head_size, len(qkv)
        heads = [self.num_attention_heads, self.num_attention_kv_heads, self.num_attention_kv_heads]
        q, k, v = qkv.view(tokens, -1, size).split(heads, dim=1)
        base, scaling = self.rotary
        described = ModelConfig(
            "LlamaForCausalLM", 1, 1, 1, 1, 1, size, 1, config.max_position_embeddings, 1e-5, base, scaling
        )
        cos, sin = (torch.from_numpy(table)[:, None] for table in rope_tables(described, tokens))
        q, k = (_rotated(x, cos, sin).bfloat16().float() for x in (q, k))
        k, v = (x.repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(tokens, -1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


MODULES = {
    "tensorrt_llm.module": {"Module": Module},
    "tensorrt_llm.parameter": {"Parameter": Parameter},
    "tensorrt_llm.layers": {
        kind.__name__: kind for kind in (Attention, AttentionMaskType, ColumnLinear, Embedding, RmsNorm)
    },
    "tensorrt.plugin": {"op": SimpleNamespace(quasar=_Operations())},
}
