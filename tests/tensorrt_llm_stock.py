"""TensorRT-LLM's own models in the double: what their modules read, and what they compute of a packed prompt."""

from __future__ import annotations

import torch
from tensorrt_llm_layers import (
    Attention,
    AttentionMaskType,
    Module,
    Parameter,
    Tensor,
    allgather,
    allreduce,
    create_tensor,
)
from torch.nn import functional

from quasar_trt.plugins import reference as ops


class _Names(Module):
    """Parameters under dotted names."""

    def add(self, name: str, parameter: Parameter) -> None:
        head, _, rest = name.partition(".")
        if not rest:
            setattr(self, head, parameter)
            return
        if head not in self._modules:
            setattr(self, head, _Names())
        self._modules[head].add(rest, parameter)


def _parameters(config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Below a layer: name -> (type, shape) on one rank, as SmoothQuant modules or unquantized ones declare them."""
    h, ranks = config.hidden_size, config.mapping.tp_size
    quantized = config.quantization.quant_algo is not None
    size = (
        h // config.num_attention_heads if quantized else config.head_size
    )  # SmoothQuant modules know no other head size
    heads, kv_heads, inner = (
        count // ranks for count in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    )
    qwen = config.architecture == "Qwen2ForCausalLM"
    assert not qwen or config.qwen_type == "qwen2"
    linears = {  # rows, columns, bias, whether it has a smoother
        "attention.qkv": ((heads + 2 * kv_heads) * size, h, config.attn_bias, False),
        "attention.dense": (h, heads * size, config.attn_bias and not qwen, True),
        "mlp.fc": (inner, h, config.mlp_bias, False),
        "mlp.gate": (inner, h, config.mlp_bias, False),
        "mlp.proj": (h, inner, config.mlp_bias, True),
    }
    found = {}
    for norm in ("input_layernorm", "post_layernorm"):
        found[f"{norm}.weight"] = ("bfloat16", (h,))
        if quantized:
            found[f"{norm}.scale_to_int"] = ("float32", (1,))
    for name, (rows, columns, bias, smoothed) in linears.items():
        found[f"{name}.weight"] = ("int8" if quantized else "bfloat16", (rows, columns))
        if quantized:
            found[f"{name}.per_channel_scale"] = ("float32", (1, rows))
            if smoothed:
                found[f"{name}.smoother"] = ("float32", (1, columns))
        if bias:
            found[f"{name}.bias"] = ("bfloat16", (rows,))
    return found


class StockModel(_Names):
    """One of TensorRT-LLM's decoders; made a class of the double by `of`."""

    ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")

    @classmethod
    def of(cls, architecture: str, base: type) -> type:
        return type(architecture, (cls, base), {})

    def __init__(self, config):
        Module.__init__(self)
        self.config, self.warnings = config, []
        assert config.quantization.quant_algo in (None, "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")
        assert config.hidden_act == "silu" and config.position_embedding_type == "rope_gpt_neox"
        self.vocab = -(-config.vocab_size // config.mapping.tp_size)
        shapes = {
            "transformer.vocab_embedding.weight": ("bfloat16", (config.vocab_size, config.hidden_size)),
            "transformer.ln_f.weight": ("bfloat16", (config.hidden_size,)),
            "lm_head.weight": ("bfloat16", (self.vocab, config.hidden_size)),
        }
        for i in range(config.num_hidden_layers):
            shapes |= {f"transformer.layers.{i}.{name}": kind for name, kind in _parameters(config).items()}
        for name, (dtype, shape) in shapes.items():
            self.add(name, Parameter(shape=shape, dtype=dtype))

    def forward(self, input_ids, last_token_ids, **inputs) -> torch.Tensor:
        config = self.config
        tensors = {name: parameter.value.trt_tensor for name, parameter in self.named_parameters()}
        x = tensors["transformer.vocab_embedding.weight"][input_ids.trt_tensor]
        for i in range(config.num_hidden_layers):
            layer = _StockLayer(config, tensors, f"transformer.layers.{i}.")
            x = layer(x)
        x = ops.rms_norm(x, tensors["transformer.ln_f.weight"], config.norm_epsilon).bfloat16()
        logits = (x.float() @ tensors["lm_head.weight"].float().T).bfloat16()
        if config.mapping.tp_size > 1:
            logits = allgather(create_tensor(logits, None), config.mapping.tp_group, gather_dim=-1).trt_tensor
        return logits.float()[last_token_ids.trt_tensor - 1]


class _StockLayer:
    """The residual stream BF16 [tokens, hidden_size] through one layer."""

    def __init__(self, config, tensors: dict[str, torch.Tensor], prefix: str):
        self.config = config
        self.tensors = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        self.quantized = config.quantization.quant_algo is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.row(
            "attention.dense", self.attended(self.column("attention.qkv", self.norm("input_layernorm", x)))
        )
        normed = self.norm("post_layernorm", x)
        gated = functional.silu(self.column("mlp.fc", normed)) * self.column("mlp.gate", normed)
        return x + self.row("mlp.proj", gated)

    def norm(self, name: str, x: torch.Tensor):
        y = ops.rms_norm(x, self.tensors[f"{name}.weight"], self.config.norm_epsilon)
        if not self.quantized:
            return y.bfloat16()
        assert self.tensors[f"{name}.scale_to_int"].item() == 1
        return ops.quantize_8(y)

    def product(self, name: str, x) -> torch.Tensor:
        if not self.quantized:
            return (x.float() @ self.tensors[f"{name}.weight"].float().T).bfloat16()
        scales = self.tensors[f"{name}.per_channel_scale"][0]
        return ops.w8a8_linear(*x, self.tensors[f"{name}.weight"], scales).bfloat16()

    def column(self, name: str, x) -> torch.Tensor:
        return self.biased(name, self.product(name, x))

    def row(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Divides, then quantizes, as two operations; the bias after the sum over ranks."""
        if self.quantized:
            x = ops.quantize_8(x / self.tensors[f"{name}.smoother"][0].bfloat16())
        y = self.product(name, x)
        if self.config.mapping.tp_size > 1:
            y = allreduce(create_tensor(y, None), self.config.mapping.tp_group).trt_tensor
        return self.biased(name, y)

    def biased(self, name: str, y: torch.Tensor) -> torch.Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def attended(self, qkv: torch.Tensor) -> torch.Tensor:
        config = self.config
        size = config.hidden_size // config.num_attention_heads if self.quantized else config.head_size
        attention = Attention(
            local_layer_idx=0,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            attention_head_size=size,
            attention_mask_type=AttentionMaskType.causal,
            bias=False,
            dtype="bfloat16",
            position_embedding_type=config.position_embedding_type,
            rotary_embedding_base=config.rotary_base,
            rotary_embedding_scaling=config.rotary_scaling,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
        )
        attention.qkv = lambda x, lora: x
        attention.dense = lambda x, **rest: x
        return attention.forward(Tensor(qkv, None), attention_params=type("Params", (), {"config": config})).trt_tensor
