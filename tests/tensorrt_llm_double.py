"""A double of the package `tensorrt_llm`, release 1.2.1, as far as building an engine touches it: signatures and behaviour as
known of the real one, layers computed at once in torch instead of being added to a network.

`build` runs the model on `ids` (one packed sequence), so that a test can look at the logits of what would be compiled.
"""

from __future__ import annotations

import enum
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from tensorrt_llm_layers import (
    MODULES,
    World,
    add_plugin,
    allgather,
    allreduce,
    cast,
    concat,
    constant,
    create_tensor,
    matmul,
    shape,
    silu,
    split,
)
from tensorrt_llm_stock import StockModel

from quasar_trt.tensorfile import map_tensors

VERSION = "1.2.1"


class SpeculativeDecodingMode(enum.IntFlag):
    NONE = 1
    DRAFT_TOKENS_EXTERNAL = 2
    MEDUSA = 4


@dataclass
class QuantConfig:
    """Strict: another key is a TypeError."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None


@dataclass
class Mapping:
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    rank: int = 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def tp_group(self) -> list[int]:
        return list(range(self.tp_size))


class PretrainedConfig:
    """Unknown keys become attributes (the real one warns)."""

    def __init__(
        self, *, architecture, dtype, hidden_size, num_hidden_layers, num_attention_heads, mapping, quantization, **rest
    ):
        self.__dict__.update(
            architecture=architecture,
            dtype=dtype,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            mapping=Mapping(**mapping),
            quantization=QuantConfig(**quantization),
            **rest,
        )

    @classmethod
    def from_json_file(cls, path: str) -> PretrainedConfig:
        values = json.loads(Path(path).read_text())
        # The real one looks the class up for its configuration, also where another class was chosen.
        config_class = getattr(
            sys.modules["tensorrt_llm.models"].MODEL_MAP[values["architecture"]], "config_class", cls
        )
        return config_class(**values)

    def set_rank(self, rank: int) -> None:
        assert rank < self.mapping.world_size
        self.mapping.rank = rank

    def to_dict(self) -> dict:
        mapping = {name: value for name, value in self.mapping.__dict__.items() if name != "rank"}
        return self.__dict__ | {"mapping": mapping, "quantization": self.quantization.__dict__}


@dataclass
class BuildConfig:
    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    max_draft_len: int = 0
    speculative_decoding_mode: SpeculativeDecodingMode = SpeculativeDecodingMode.NONE
    gather_context_logits: bool = False
    strongly_typed: bool = True
    output_timing_cache: str | None = "model.cache"
    plugin_config: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            use_paged_context_fmha=True, tokens_per_block=32, remove_input_padding=True
        )
    )


@dataclass
class Engine:
    """logits: what the network gives for the double's ids, None where it was not run."""

    model: object
    options: BuildConfig
    logits: torch.Tensor | None

    def save(self, directory: str) -> None:
        path, config = Path(directory), self.model.config
        path.mkdir(parents=True, exist_ok=True)
        if config.mapping.rank == 0:
            options = self.options.__dict__ | {"plugin_config": self.options.plugin_config.__dict__}
            values = {"version": VERSION, "pretrained_config": config.to_dict(), "build_config": options}
            (path / "config.json").write_text(json.dumps(values))
        (path / f"rank{config.mapping.rank}.engine").write_bytes(b"engine of rank %d" % config.mapping.rank)


class DecoderModelForCausalLM(MODULES["tensorrt_llm.module"]["Module"]):
    def __init__(self, config, transformer, lm_head):
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.lm_head = lm_head
        self.warnings: list[str] = []

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        assert config.quantization.quant_algo in (None, "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")
        arrays = map_tensors(Path(ckpt_dir, f"rank{config.mapping.rank}.safetensors"))
        model = cls(config)
        model.load({name: _to_torch(array) for name, array in arrays.items()})
        return model

    def load(self, weights: dict) -> None:
        """A missing tensor is an error, an unexpected one a warning."""
        required = {name for name, parameter in self.named_parameters() if not parameter.is_inited()}
        if missing := required - weights.keys():
            raise RuntimeError(f"Required but not provided tensors:{missing}")
        if unexpected := weights.keys() - required:
            self.warnings.append(f"Provided but not required tensors: {unexpected}")
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.value = weights[name]

    def forward(
        self,
        input_ids,
        position_ids=None,
        use_cache=False,
        last_token_ids=None,
        kv_cache_params=None,
        attention_params=None,
    ):
        """[tokens, padded vocabulary] float32 of the rows that last_token_ids (from 1) name."""
        assert use_cache
        states, presents = self.transformer.forward(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            attention_mask=None,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        assert len(presents) == self.config.num_hidden_layers
        rows = create_tensor(states.trt_tensor[last_token_ids.trt_tensor - 1], states.producer)
        logits = self.lm_head(rows)
        assert self.config.logits_dtype == "float32"
        return logits.trt_tensor.float()


def run(model, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, padded vocabulary] of a model of one rank, or as one of several ranks in `World`."""
    rows = torch.arange(len(ids))
    return model(
        input_ids=create_tensor(torch.tensor(ids), None),
        position_ids=create_tensor(rows, None),
        use_cache=True,
        last_token_ids=create_tensor(rows + 1, None),
        kv_cache_params=SimpleNamespace(),
        attention_params=SimpleNamespace(config=model.config),
    )


def run_ranks(models: list, ids: list[int]) -> list[torch.Tensor]:
    """The same of the models of all ranks, which wait for each other where they add up."""
    results: dict[int, torch.Tensor] = {}

    def work(rank: int) -> None:
        with World.rank(world, rank):
            results[rank] = run(models[rank], ids)

    world = World(len(models))
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[rank] for rank in range(len(models))]


def _to_torch(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


class TensorRTLLMDouble:
    """engines: every engine that was built. ids: what `build` runs each model on, if anything. fails: what `build` raises."""

    def __init__(self, sm: int = 90, gpus: int = 1):
        self.sm = sm
        self.gpus = gpus
        self.engines: list[Engine] = []
        self.devices: list[int] = []
        self.ids: list[int] | None = None
        self.fails: Exception | None = None

    def build(self, model, build_config: BuildConfig) -> Engine:
        if self.fails:
            raise self.fails
        if self.sm in range(100, 120) and model.config.quantization.quant_algo:
            raise RuntimeError("SmoothQuant is not supported on SM>=100.")
        if build_config.speculative_decoding_mode is not SpeculativeDecodingMode.NONE:
            build_config.max_seq_len += build_config.max_draft_len
            assert not build_config.gather_context_logits
        logits = run(model, self.ids) if self.ids else None
        self.engines.append(Engine(model, build_config, logits))
        return self.engines[-1]

    def install(self, monkeypatch, release: str | None = VERSION) -> TensorRTLLMDouble:
        """As the installed packages of a host with `gpus` GPUs; release: what distribution tensorrt-llm says, None if absent."""
        from quasar_trt.engines import cuda_device

        version = lambda name: release if name == "tensorrt-llm" else "1"  # noqa: E731
        monkeypatch.setattr("quasar_trt.tensorrt_llm_stack.version_of", version)
        monkeypatch.setattr(cuda_device, "CudaDevice", lambda: SimpleNamespace(sm=self.sm, name="a double"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.gpus)
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)
        model_map = {name: StockModel.of(name, DecoderModelForCausalLM) for name in StockModel.ARCHITECTURES}
        contents = MODULES | {
            "tensorrt_llm": {"__version__": VERSION},
            "tensorrt_llm._common": {"default_trtnet": lambda: SimpleNamespace(add_plugin=add_plugin)},
            "tensorrt_llm._utils": {
                "get_sm_version": lambda: self.sm,
                "pad_vocab_size": lambda size, tp_size: -(-size // tp_size) * tp_size,
            },
            "tensorrt_llm.functional": {
                "_create_tensor": create_tensor,
                **{f.__name__: f for f in (allgather, allreduce, cast, concat, constant, matmul, shape, silu, split)},
            },
            "tensorrt_llm.builder": {"BuildConfig": BuildConfig, "build": self.build},
            "tensorrt_llm.models": {"MODEL_MAP": model_map},
            "tensorrt_llm.models.modeling_utils": {
                "DecoderLayerList": DecoderLayerList,
                "DecoderModelForCausalLM": DecoderModelForCausalLM,
                "PretrainedConfig": PretrainedConfig,
                "QuantConfig": QuantConfig,
                "SpeculativeDecodingMode": SpeculativeDecodingMode,
            },
            "tensorrt": {"__version__": "10.14.1"},
            "quasar_trt.plugins.tensorrt": {},
        }
        for name, attributes in contents.items():
            module = ModuleType(name)
            module.__path__ = []
            module.__dict__.update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "quasar_trt.builders.tensorrt_llm_model", raising=False)
        return self


class DecoderLayerList(MODULES["tensorrt_llm.module"]["Module"]):
    """cls: called as cls(config, layer) for each layer of this rank."""

    def __init__(self, cls, config):
        super().__init__()
        for layer in range(config.num_hidden_layers):
            self._modules[str(layer)] = cls(config, layer)

    def forward(self, hidden_states, use_cache=False, attention_mask=None, kv_cache_params=None, attention_params=None):
        presents = []
        for layer in self._modules.values():
            hidden_states, present = layer(
                hidden_states,
                use_cache=use_cache,
                attention_mask=attention_mask,
                kv_cache_params=kv_cache_params,
                attention_params=attention_params,
            )
            presents.append(present)
        return hidden_states, presents
