"""Train Medusa heads and an EAGLE head for an engine: python examples/train_heads.py ENGINE_DIR OUTPUT_DIR [--help]

The engine answers prompts, and the heads learn to foretell its answers from its hidden states; its embedding and head stay as they are.
OUTPUT_DIR/medusa and OUTPUT_DIR/eagle are then in the published formats, for --drafter medusa:DIR and eagle:DIR.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from quasar_trt import Runner, SamplingParams
from quasar_trt.engines.base import Acceptance, SequenceStep


def write_texts(runner: Runner, prompts: list[str], samples: int, max_tokens: int) -> list[list[int]]:
    """Ids of each prompt with an answer of the model's own, several of each, drawn at temperatures up to 1."""
    chats = runner.tokenizer.chat_template is not None
    ids = [runner.chat_ids([{"role": "user", "content": text}]) if chats else text for text in prompts]
    texts = []
    for sample in range(samples):
        params = SamplingParams(temperature=sample / samples, seed=sample, max_tokens=max_tokens)
        texts += [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in runner.generate(ids, params)]
    return [text for text in texts if len(text) > 2]


def last_states(engine, text: list[int]) -> torch.Tensor:
    """The states behind the final norm [tokens, hidden_size] of a text, in the basis of the source model."""
    engine.keep_hidden_states([engine.config.num_hidden_layers])
    sequence, found = engine.open(), []
    for start in range(0, len(text), engine.capabilities.max_rows):
        part = text[start : start + engine.capabilities.max_rows]
        engine.step([SequenceStep(sequence, part, needs_logits=False)], lambda *_: Acceptance((), 0))
        found.append(torch.from_numpy(engine.hidden_states(0, range(len(part)))[:, 0]))
    engine.close(sequence)
    return torch.cat(found)


class MedusaHeads(nn.Module):
    """A residual block for each head."""

    def __init__(self, hidden_size: int, heads: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(heads))
        for block in self.blocks:
            nn.init.zeros_(block.weight)

    def loss(self, states, targets, embedded, head):
        """Of head i, the token i + 2 places on."""
        losses = []
        for i, block in enumerate(self.blocks, 2):
            x = states[: len(states) - i]
            losses.append(functional.cross_entropy(head(x + functional.silu(block(x))), targets[i:]))
        return sum(losses) / len(losses)

    def tensors(self, head: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for i, block in enumerate(self.blocks):
            found |= {
                f"{i}.0.linear.weight": block.weight,
                f"{i}.0.linear.bias": block.bias,
                f"{i}.1.weight": head.clone(),
            }
        return found


class EagleHead(nn.Module):
    """A linear over an embedding and a state, and a Llama layer without a norm before its attention."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded, states):
        x = self.fc(torch.cat([embedded, states], dim=-1))[None]
        out = self.layer(x, position_embeddings=self.rotary(x, torch.arange(x.shape[1])[None]))
        return (out[0] if isinstance(out, tuple) else out).reshape(states.shape)

    def loss(self, states, targets, embedded, head):
        """The next state, and the token that the model would emit from it; from the model's states, and then from the head's own."""
        found, before = 0.0, states[:-1]
        for _ in range(2):
            after = self(embedded[1:], before)
            found = found + functional.smooth_l1_loss(after, states[1:])
            found = found + 0.1 * functional.cross_entropy(head(after[:-1]), targets[2:])
            before = torch.cat([states[:1], after[:-1].detach()])
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        layer = {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        return layer | {"fc.weight": self.fc.weight, "fc.bias": self.fc.bias}


def train(heads: nn.Module, data, embedding, head_weight, steps: int, rate: float) -> None:
    """One text at a step. The loss knows only the ids that occur in the texts: there are far fewer of them."""
    ids = torch.cat([text for text, _ in data]).unique()
    places = torch.zeros(len(embedding), dtype=torch.long)
    places[ids] = torch.arange(len(ids))
    weight = head_weight[ids]
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    order = torch.Generator().manual_seed(0)
    began, total = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        text, states = data[int(torch.randint(len(data), (), generator=order))]
        if len(text) <= 2 + len(getattr(heads, "blocks", ())):
            schedule.step()
            continue
        loss = heads.loss(states, places[text], embedding[text], lambda x: functional.linear(x, weight))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(heads.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % max(steps // 10, 1) == 0:
            seconds = time.perf_counter() - began
            print(f"{type(heads).__name__}: step {step}, mean loss {total / max(steps // 10, 1):.3f}, {seconds:.0f} s")
            total = 0.0


def save(directory: Path, values: dict, tensors: dict[str, torch.Tensor], file: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    save_file({name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}, directory / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine_dir")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument(
        "--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl", help="lines with a prompt"
    )
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--steps", type=int, default=1500, help="texts that each kind of head is trained on")
    parser.add_argument("--heads", type=int, default=3, help="Medusa's")
    options = parser.parse_args()

    runner = Runner.from_dir(options.engine_dir)
    engine, config = runner.engine, runner.engine.config
    prompts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
    texts = write_texts(runner, prompts, options.samples, options.max_tokens)
    print(f"{len(texts)} texts, {sum(map(len, texts))} tokens")
    data = [(torch.tensor(text), last_states(engine, text)) for text in texts]
    embedding = torch.from_numpy(engine.embeddings(range(config.vocab_size)))
    head = torch.from_numpy(engine.head_logits(torch.eye(config.hidden_size).numpy())).T.contiguous()

    torch.manual_seed(0)
    medusa = MedusaHeads(config.hidden_size, options.heads)
    train(medusa, data, embedding, head, options.steps, 1e-3)
    values = {"medusa_num_heads": options.heads, "medusa_num_layers": 1, "base_model_name_or_path": options.engine_dir}
    save(options.output_dir / "medusa", values, medusa.tensors(head), "medusa_lm_head.safetensors")

    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": config.rotary_scaling,
        "hidden_act": "silu",
    }
    llama = LlamaConfig(**values, attn_implementation="sdpa")
    eagle = EagleHead(llama)
    train(eagle, data, embedding, head, options.steps, 1e-3)
    save(options.output_dir / "eagle", values, eagle.tensors(), "model.safetensors")
    print(f"saved {options.output_dir / 'medusa'} and {options.output_dir / 'eagle'}")


if len(sys.argv) < 3:
    sys.exit(__doc__)
main()
