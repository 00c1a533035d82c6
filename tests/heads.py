"""Random heads in their published formats, and what they propose, computed plainly in torch, path by path and without a cache."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from quasar_trt.drafters.base import NO_DRAFT, Draft, Drafter, DraftRequest
from quasar_trt.model_config import ModelConfig


def _random(shape: Sequence[int], generator: torch.Generator, spread: float = 1.0) -> Tensor:
    """BF16 values, so that nothing is lost where they are stored so."""
    weight = torch.randn(*shape, generator=generator) * spread / shape[-1] ** 0.5
    return weight.bfloat16().float()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def medusa_tensors(config: ModelConfig, heads: int, layers: int, shared: bool = False) -> dict[str, Tensor]:
    """shared: all heads end in one linear."""
    generator = torch.Generator().manual_seed(7)
    last = _random((config.vocab_size, config.hidden_size), generator)
    tensors = {}
    for i in range(heads):
        for layer in range(layers):
            tensors[f"{i}.{layer}.linear.weight"] = _random((config.hidden_size,) * 2, generator)
            tensors[f"{i}.{layer}.linear.bias"] = _random((config.hidden_size,), generator)
        own = _random((config.vocab_size, config.hidden_size), generator)
        tensors[f"{i}.{layers}.weight"] = last.clone() if shared else own
    return tensors


def write_medusa(
    directory: Path, tensors: dict[str, Tensor], heads: int, layers: int, file: str = "medusa_lm_head.safetensors"
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    values = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "tiny"}
    (directory / "config.json").write_text(json.dumps(values))
    _save(tensors, directory / file)
    return directory


EAGLE_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8}


def eagle_values(config: ModelConfig, **others) -> dict:
    return (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": config.hidden_size,
            "num_hidden_layers": 1,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
        }
        | EAGLE_SIZES
        | others
    )


def eagle_tensors(
    config: ModelConfig, third: bool, values: dict, fc_bias: bool = True, embedding: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden, size = values["hidden_size"], values["head_dim"]
    heads, kv_heads, middle = (
        values[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    prefix, inputs = ("midlayer.", 2) if third else ("layers.0.", 1)
    shapes = {
        "self_attn.q_proj": (heads * size, inputs * hidden),
        "self_attn.k_proj": (kv_heads * size, inputs * hidden),
        "self_attn.v_proj": (kv_heads * size, inputs * hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    tensors = {f"{prefix}{name}.weight": _random(shape, generator) for name, shape in shapes.items()}
    norms = [f"{prefix}post_attention_layernorm"]
    if third:
        norms += [f"{prefix}input_layernorm", f"{prefix}hidden_norm", "norm"]
        drafted = values["draft_vocab_size"]
        tensors["fc.weight"] = _random((hidden, 3 * config.hidden_size), generator)
        tensors["lm_head.weight"] = _random((drafted, hidden), generator, 6.0)
        ids = torch.randperm(config.vocab_size, generator=generator)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(config.vocab_size), ids)
    else:
        tensors["fc.weight"] = _random((hidden, 2 * hidden), generator)
        if fc_bias:
            tensors["fc.bias"] = _random((hidden,), generator)
    for norm in norms:
        tensors[f"{norm}.weight"] = (1 + 0.3 * torch.randn(hidden, generator=generator)).bfloat16().float()
    if embedding:
        tensors["embed_tokens.weight"] = _random((config.vocab_size, hidden), generator, hidden**0.5)
    return tensors


def write_eagle(directory: Path, values: dict, tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    _save(tensors, directory / file)
    return directory


def medusa_logits(tensors: dict[str, Tensor], heads: int, layers: int, state: Tensor) -> list[Tensor]:
    """[vocab] of each head."""
    found = []
    for i in range(heads):
        x = state
        for layer in range(layers):
            weight, bias = tensors[f"{i}.{layer}.linear.weight"], tensors[f"{i}.{layer}.linear.bias"]
            x = x + functional.silu(functional.linear(x, weight, bias))
        found.append(tensors[f"{i}.{layers}.weight"] @ x)
    return found


class PlainEagle:
    """An EAGLE head over whole texts. embedding: [vocab, hidden_size]; head: features [rows, hidden_size] -> logits."""

    def __init__(self, tensors: dict[str, Tensor], values: dict, embedding: Tensor, head: Callable[[Tensor], Tensor]):
        self.tensors, self.values, self.embedding = tensors, values, embedding
        self.third = "midlayer.hidden_norm.weight" in tensors
        self.prefix = "midlayer." if self.third else "layers.0."
        self.head = self._own_head if self.third else head

    def _own_head(self, features: Tensor) -> Tensor:
        small = functional.linear(self._norm("norm", features), self.tensors["lm_head.weight"])
        logits = torch.full((len(features), len(self.embedding)), -torch.inf)
        logits[:, torch.arange(small.shape[1]) + self.tensors["d2t"]] = small
        return logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.values["rms_norm_eps"])

    def first_features(self, states: Tensor) -> Tensor:
        """Of the verifier's states [tokens, places, hidden_size]."""
        return functional.linear(states.flatten(1), self.tensors["fc.weight"]) if self.third else states[:, 0]

    def features(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """Those after each of `tokens`, from those before them; the first token is at position 1 of its text."""
        embedded = self.embedding[list(tokens)]
        if self.third:
            residual = before
            normed = self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", before)
            x = torch.cat(normed, dim=1)
        else:
            bias = self.tensors.get("fc.bias")
            x = residual = functional.linear(torch.cat([embedded, before], dim=1), self.tensors["fc.weight"], bias)
        rows, size = len(x), self.values["head_dim"]
        q, k, v = (
            self._linear(f"self_attn.{name}_proj", x).view(rows, -1, size).transpose(0, 1) for name in ("q", "k", "v")
        )
        angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        turned = torch.polar(torch.ones_like(angles), angles)
        q, k = (self._turn(each, turned) for each in (q, k))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = residual + self._linear("self_attn.o_proj", attended.transpose(0, 1).reshape(rows, -1))
        normed = self._norm(f"{self.prefix}post_attention_layernorm", x)
        middle = functional.silu(self._linear("mlp.gate_proj", normed)) * self._linear("mlp.up_proj", normed)
        return x + self._linear("mlp.down_proj", middle)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.tensors[f"{self.prefix}{name}.weight"])

    @staticmethod
    def _turn(x: Tensor, turned: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        product = torch.complex(first, second) * turned
        return torch.cat([product.real, product.imag], dim=-1)

    def after(self, context: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """The distribution [vocab] behind a path, computed from the beginning of the text."""
        before, tokens = self.first_features(states), list(context[1:])
        for token in path:  # the head's own features take the place of the verifier's
            before = torch.cat([before, self.features(tokens, before)[-1:]])
            tokens.append(token)
        return self.head(self.features(tokens, before)[-1:])[0].softmax(0)

    def joint(self, context: Sequence[int], states: Tensor, path: Sequence[int]) -> float:
        """The probability of a path."""
        found = [float(self.after(context, states, path[:i])[token]) for i, token in enumerate(path)]
        return math.prod(found)

    def likeliest(self, context: Sequence[int], states: Tensor, depth: int, width: int, limit: int) -> list[float]:
        """Of EAGLE-2's tree the probabilities of its paths."""
        nodes: list[float] = []
        beam: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
        for _ in range(min(depth, limit)):
            level = []
            for joint, path in beam:
                best = self.after(context, states, path).topk(width)
                level += [
                    (joint * p, (*path, token))
                    for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ]
            nodes += [joint for joint, _ in level]
            beam = sorted(level, key=lambda node: -node[0])[:width]
        return sorted(nodes, reverse=True)[:limit]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The path to each token of a draft."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.ids, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def _another(token: int) -> int:
    return (token + 1) % 250


class Watched(Drafter):
    """Another drafter, what it reads and proposes noted; every second draft is replaced by a tree that holds three right tokens.

    answers: prompt -> ids that plain decoding emits. states: request -> position -> state in the source's basis; proposals: (ids of the context, limit, draft,
    states so far).
    """

    def __init__(self, drafter: Drafter, answers: dict[tuple[int, ...], Sequence[int]]):
        self.drafter, self.answers = drafter, answers
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self.states: dict[int, dict[int, Tensor]] = {}
        self.proposals: list[tuple[list[int], int, Draft, Tensor]] = []
        self.contexts: dict[int, Sequence[int]] = {}
        self._num_steps = 0
        self._prompts: dict[int, tuple[int, ...]] = {}

    def attach(self, engine, step_cost, tokenizer):
        self.drafter.attach(engine, step_cost, tokenizer)
        self.hidden_layers = self.drafter.hidden_layers
        last = engine.config.num_hidden_layers
        self._turns = [engine.source_basis.to_source(behind_norm=layer == last) for layer in self.hidden_layers]

    def start(self, request_id, context):
        self.contexts[request_id], self._prompts[request_id] = context, tuple(context)
        self.states[request_id] = {}
        self.drafter.start(request_id, context)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self.drafter.propose(batch)
        for request, draft in zip(batch, drafts, strict=True):
            known = self.states[request.request_id]
            states = torch.stack([known[i] for i in sorted(known)]) if known else torch.empty(0)
            self.proposals.append((list(request.context), request.limit, draft, states))
        self._num_steps += 1
        if self._num_steps % 2:
            return drafts
        return [self._right(request) if request.tree else draft for request, draft in zip(batch, drafts, strict=True)]

    def _right(self, request: DraftRequest) -> Draft:
        prompt = self._prompts[request.request_id]
        begin = len(request.context) - len(prompt)
        right = list(self.answers[prompt][begin : begin + 3])
        if request.limit < 6 or len(right) < 3:
            return NO_DRAFT
        return Draft((_another(right[0]), right[0], _another(right[1]), right[1], right[2]), (-1, -1, 1, 1, 3))

    def read_states(self, request_id, position, states):
        for place, state in enumerate(states, position):
            turned = [x if turn is None else turn @ x for x, turn in zip(state, self._turns, strict=True)]
            self.states[request_id][place] = torch.from_numpy(np.stack(turned))
        self.drafter.read_states(request_id, position, states)

    def observe(self, request_id, emitted, num_accepted_tokens):
        self.drafter.observe(request_id, emitted, num_accepted_tokens)

    def pause(self, request_id):
        self.drafter.pause(request_id)

    def stop(self, request_id):
        self.drafter.stop(request_id)
