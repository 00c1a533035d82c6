"""Train Medusa heads and an EAGLE-3 head for an engine: python examples/train_heads.py ENGINE_DIR OUTPUT_DIR [--help]

The engine writes conversations with itself, and the heads learn to foretell its answers from its hidden states; its embedding and head stay
as they are. OUTPUT_DIR/medusa and OUTPUT_DIR/eagle are then in the published formats, for --drafter medusa:DIR and eagle:DIR. The model
needs seven layers or more.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from quasar_trt import Runner, SamplingParams
from quasar_trt.engines.base import Acceptance, Engine, SequenceStep
from quasar_trt.tokenizer import chat_text

TEMPERATURES = (0, 0.3, 0.6, 1.0)  # of answers, in turn


def write_texts(runner: Runner, count: int, max_tokens: int) -> list[list[int]]:
    """Ids of texts that the model wrote: what it takes a user to say, and its answer; of a model without a chat template, texts
    that begin with any token."""
    tokenizer = runner.tokenizer
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(runner.engine.config.vocab_size, (count, 1), generator=random).tolist()
    if tokenizer.chat_template:
        mark = "<<content>>"
        opening = chat_text(tokenizer, [{"role": "user", "content": mark}], add_generation_prompt=False).split(mark)[0]
        ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
        params = [SamplingParams(temperature=1, seed=seed, max_tokens=96) for seed in range(count)]
        said = [each.outputs[0].text.strip() for each in runner.generate([ids] * count, params)]
        prompts = [runner.chat_ids([{"role": "user", "content": text}]) for text in said]
    params = [
        SamplingParams(temperature=TEMPERATURES[seed % len(TEMPERATURES)], seed=seed, max_tokens=max_tokens)
        for seed in range(len(prompts))
    ]
    answers = runner.generate(prompts, params)
    return [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in answers]


def states_of(engine: Engine, text: list[int], places: list[int]) -> Tensor:
    """The hidden states of a text [tokens, places, hidden_size], BF16, in the basis of the source model."""
    engine.keep_hidden_states(places)
    sequence, found, most = engine.open(), [], engine.capabilities.max_rows
    for start in range(0, len(text), most):
        part = text[start : start + most]
        engine.step([SequenceStep(sequence, part, needs_logits=False)], lambda *_: Acceptance((), 0))
        found.append(torch.from_numpy(engine.hidden_states(0, range(len(part)))))
    engine.close(sequence)
    states = torch.cat(found)
    for i, place in enumerate(places):
        turn = engine.source_basis.to_source(behind_norm=place == engine.config.num_hidden_layers)
        if turn is not None:
            states[:, i] = states[:, i] @ torch.tensor(turn).T
    return states.bfloat16()


class MedusaHeads(nn.Module):
    """A residual block for each head; all end in the model's own head."""

    def __init__(self, hidden_size: int, num_heads: int, head: Tensor):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        self.head = head
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, embedded: Tensor, states: Tensor, depth: int | None) -> list[Tensor]:
        """Of head i, logits of the token i + 2 places on; of the first `depth` heads, or of all."""
        last = states[:, -1]
        return [
            functional.linear(last + functional.silu(block(last)), self.head)[: -i - 1]
            for i, block in enumerate(self.blocks[:depth])
        ]

    def tensors(self, head: Tensor) -> dict[str, Tensor]:
        found = {}
        for i, block in enumerate(self.blocks):
            found |= {f"{i}.0.linear.{name}": tensor for name, tensor in block.state_dict().items()}
            found[f"{i}.1.weight"] = head
        return found


class EagleHead(nn.Module):
    """EAGLE-3's decoder layer, read `depth` times: each time goes on from what came of the one before, and sees the rows that began at
    the model's states and those of its own path (Li et al., arXiv 2503.01840)."""

    def __init__(self, config, head: Tensor, depth: int = 3):
        super().__init__()
        hidden, self.config, self.head, self.depth = config.hidden_size, config, head, depth
        sizes = {
            "q": (2 * hidden, config.attention_size),
            "k": (2 * hidden, config.kv_size),
            "v": (2 * hidden, config.kv_size),
            "o": (config.attention_size, hidden),
            "gate": (hidden, config.intermediate_size),
            "up": (hidden, config.intermediate_size),
            "down": (config.intermediate_size, hidden),
        }
        self.linears = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.norms = nn.ParameterDict({n: torch.ones(hidden) for n in ("input", "hidden", "post", "last")})
        with torch.no_grad():  # at first the layer does nothing to the last of the states
            self.fc.weight.copy_(torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1))
            self.linears["o"].weight.zero_()
            self.linears["down"].weight.zero_()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.norms[name], self.config.norm_epsilon)

    def _heads(self, name: str, x: Tensor, first: int | None = None) -> Tensor:
        """[rows, heads, size]; with RoPE from a position on."""
        size = self.config.head_size
        found = self.linears[name](x).view(len(x), -1, size)
        if first is not None:
            frequencies = self.config.rotary_base ** (-torch.arange(0, size, 2) / size)
            angles = (torch.arange(len(x)) + first)[:, None, None] * frequencies
            a, b = found.chunk(2, dim=-1)
            found = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
        return found

    def forward(self, embedded: Tensor, states: Tensor, depth: int | None) -> list[Tensor]:
        """Of reading i, logits of the token i + 2 places on; of the first `depth` readings, or of all."""
        x, found, paths = self.fc(states[:, :3].flatten(1)), [], []
        for i in range(min(depth or self.depth, len(embedded) - 1)):
            rows = len(embedded) - 1 - i
            x = x[:rows]
            normed = torch.cat([self._norm("input", embedded[1 + i :]), self._norm("hidden", x)], dim=-1)
            queries = self._heads("q", normed, i)
            group = self.config.num_attention_heads // self.config.num_key_value_heads
            keys, values = self._heads("k", normed, i), self._heads("v", normed)
            paths.append([each.repeat_interleave(group, dim=1) for each in (keys, values)])
            (first_keys, first_values), *later = [[each[:rows] for each in path] for path in paths]
            scores = torch.einsum("qhd,khd->hqk", queries, first_keys)
            scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), -torch.inf)
            own = [torch.einsum("qhd,qhd->hq", queries, keys)[..., None] for keys, _ in later]
            weights = (torch.cat([scores, *own], dim=-1) / math.sqrt(self.config.head_size)).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights[..., :rows], first_values)
            for place, (_, values) in enumerate(later, rows):
                attended = attended + weights[..., place].T[..., None] * values
            x = x + self.linears["o"](attended.flatten(1))
            normed = self._norm("post", x)
            middle = functional.silu(self.linears["gate"](normed)) * self.linears["up"](normed)
            x = x + self.linears["down"](middle)
            found.append(functional.linear(self._norm("last", x), self.head))
        return found

    def tensors(self, ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
        names = {"input": "input_layernorm", "hidden": "hidden_norm", "post": "post_attention_layernorm"}
        found = {f"midlayer.{name}.weight": self.norms[short] for short, name in names.items()}
        for short, linear in self.linears.items():
            part = "self_attn" if short in "qkvo" else "mlp"
            found[f"midlayer.{part}.{short}_proj.weight"] = linear.weight
        found |= {"fc.weight": self.fc.weight, "norm.weight": self.norms["last"], "lm_head.weight": self.head}
        return found | {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(vocab_size), ids)}


def faster_dtype(weight: Tensor) -> torch.dtype:
    """Of products with this weight on this machine."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, cast = torch.ones(256, weight.shape[1], dtype=dtype), weight.to(dtype)
        for _ in range(3):
            began = time.perf_counter()
            functional.linear(x, cast)
            seconds[dtype] = time.perf_counter() - began
    return min(seconds, key=seconds.get)


def train(heads: nn.Module, data, embedding: Tensor, head: Tensor, passes: float, rate: float, batch: int = 4) -> None:
    """By the model's own distributions over the ids of `head` as soft targets; what lies farther on counts less. At first only what
    comes next is learned, which takes a fraction of the time."""
    name, steps = type(heads).__name__, max(1, round(passes * len(data) / batch))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = 1 + steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    random, order = torch.Generator().manual_seed(0), []
    began, total, shown, dtype = time.perf_counter(), 0.0, max(steps // 10, 1), faster_dtype(head)
    for step in range(1, steps + 1):
        depth = None if step > 0.75 * steps else 1
        for _ in range(batch):
            order = order or torch.randperm(len(data), generator=random).tolist()
            text, states = data[order.pop()]
            states = states.float()
            targets = functional.linear(states[:, -1], head).softmax(-1)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                found = heads(embedding[text], states, depth)
            losses = [
                functional.cross_entropy(logits.float(), targets[i : i + len(logits)])
                for i, logits in enumerate(found, 1)
            ]
            loss = sum(0.8**i * each for i, each in enumerate(losses)) / batch
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(heads.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % shown == 0:
            print(f"{name}: step {step} of {steps}, loss {total / shown:.3f}, {time.perf_counter() - began:.0f} s")
            total = 0.0


def save(directory: Path, values: dict, tensors: dict[str, Tensor], file: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    stored = {name: tensor.detach() for name, tensor in tensors.items()}
    stored = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    save_file({name: tensor.clone() for name, tensor in stored.items()}, directory / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine_dir")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--texts", type=int, default=2000, help="that the model writes (default: 2000)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer (default: 256)")
    parser.add_argument("--heads", type=int, default=3, help="of Medusa (default: 3)")
    parser.add_argument("--draft-vocab-size", type=int, default=8192, help="ids that EAGLE can draft (default: 8192)")
    options = parser.parse_args()

    runner = Runner.from_dir(options.engine_dir, drafter=None)
    engine, config, began = runner.engine, runner.engine.config, time.perf_counter()
    layers = config.num_hidden_layers
    if layers < 7 or not engine.capabilities.hidden_states:
        sys.exit(
            f"{options.engine_dir} has {layers} layers; allowed: 7 or more, and an engine that gives hidden states"
        )
    texts = [text for text in write_texts(runner, options.texts, options.max_tokens) if len(text) > 5]
    print(f"{len(texts)} texts, {sum(map(len, texts))} tokens, {time.perf_counter() - began:.0f} s")
    places = [2, layers // 2, layers - 3, layers]
    data = [(torch.tensor(text), states_of(engine, text, places)) for text in texts]
    print(f"hidden states, {time.perf_counter() - began:.0f} s")
    embedding = torch.from_numpy(engine.embeddings(range(config.vocab_size)))
    head = torch.from_numpy(engine.head_logits(torch.eye(config.hidden_size).numpy())).T.contiguous()
    if (turn := engine.source_basis.to_source()) is not None:
        embedding = embedding @ torch.tensor(turn).T
        head = head @ torch.tensor(engine.source_basis.for_head())
    # The ids that occur most often; the losses know these alone.
    counts = torch.bincount(torch.cat([text for text, _ in data]), minlength=config.vocab_size)
    ids = counts.topk(min(options.draft_vocab_size, config.vocab_size)).indices.sort().values
    own = head[ids].contiguous()

    torch.manual_seed(0)
    medusa = MedusaHeads(config.hidden_size, options.heads, own)
    train(medusa, data, embedding, own, 1.5, 1e-3)
    values = {"medusa_num_heads": options.heads, "medusa_num_layers": 1, "base_model_name_or_path": options.engine_dir}
    save(options.output_dir / "medusa", values, medusa.tensors(head), "medusa_lm_head.safetensors")

    eagle = EagleHead(config, own)
    train(eagle, data, embedding, own, 5.5, 2e-3)
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(ids),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "hidden_act": "silu",
    }
    save(options.output_dir / "eagle", values, eagle.tensors(ids, config.vocab_size), "model.safetensors")
    print(
        f"saved {options.output_dir / 'medusa'} and {options.output_dir / 'eagle'}, {time.perf_counter() - began:.0f} s"
    )


if len(sys.argv) < 2:
    sys.exit(__doc__)
main()
