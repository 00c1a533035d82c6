"""What an engine answers to many questions; as a program, with engine directories as arguments, on several ranks.

mpirun -n N python rank_scenario.py OUTPUT.pickle ENGINE_DIR...
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
from engine_steps import prefill, rows_of

from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import SequenceStep
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=16, n=2)

DRAFTERS = {
    "plain": (None, None),
    "ngram": ("ngram", None),
    "suffix": ("suffix", {"num_speculative_tokens": 5}),
    "trees": ("suffix", {"num_speculative_tokens": 6, "branches": 3}),
}


def ids_of(count: int, seed: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def logits(directory: Path) -> dict[str, np.ndarray]:
    """Rows of one sequence, however it is cut, of a fork and after rollback."""
    engine = open_engine(directory, "cpu", threads=1)
    ids = ids_of(80, 3, engine.config.vocab_size)
    found = {}
    sequence = engine.open()
    found["token by token"] = np.stack([rows_of(engine, [SequenceStep(sequence, [token])])[0][0] for token in ids])
    engine.close(sequence)
    sequence, last = prefill(engine, ids[:60], 7)
    copy = engine.fork(sequence)
    rest = [SequenceStep(sequence, ids[60:61], Draft(tuple(ids[61:]))), SequenceStep(copy, ids[60:70])]
    rows = rows_of(engine, rest, keep=0)
    found["in chunks, then as a draft"] = np.concatenate([last[None], rows[0]])
    found["of a fork"] = rows[1]
    engine.truncate(copy, 40)
    found["after rollback"] = rows_of(engine, [SequenceStep(copy, ids[40:60])])[0]
    return found


def answers(directory: Path) -> dict[str, object]:
    """Ids by drafter and parameters; of requests that begin alike, with little memory, and after one was aborted."""
    found = {}
    prompts = None
    for name, (drafter, options) in DRAFTERS.items():
        engine = open_engine(directory, "cpu", threads=1)
        prompts = [ids_of(count, 20 + count, engine.config.vocab_size) for count in (3, 9, 30, 70)]
        prompts = [ids + ids[: len(ids) // 2] for ids in prompts]  # something to draft from
        runner = Runner(engine, drafter=make_drafter(drafter, options) if drafter else None)
        for sampling, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            outputs = runner.generate(prompts, params)
            found[f"{sampling}, {name}"] = [each.token_ids for output in outputs for each in output.outputs]
        found[f"accepted, {name}"] = runner.stats.num_accepted_tokens
    found["drafted later"] = runner.generate([[*prompt, 1] for prompt in prompts], GREEDY)  # their prefixes are kept
    found["drafted later"] = [output.outputs[0].token_ids for output in found["drafted later"]]
    found["reused"] = runner.service.num_reused_tokens
    aborted, other = runner.prepare(prompts[2], GREEDY), runner.prepare(prompts[3], SAMPLED)
    runner.submit(aborted)
    runner.submit(other)
    for _ in range(5):
        runner.step()
    runner.abort(aborted)
    while not other.finished:
        runner.step()
    found["aborted"] = [each.token_ids for each in (*aborted.output().outputs, *other.output().outputs)]
    growing = [ids_of(58, seed, engine.config.vocab_size) for seed in range(4)]  # soon of a second page each
    found["much memory"] = [output.outputs[0].token_ids for output in runner.generate(growing, GREEDY)]
    runner.reset_prefix_cache()
    small = Runner(engine, kv_cache_memory_bytes=5 * engine.bytes_of(64), drafter=make_drafter("suffix", None))
    found["little memory"] = [output.outputs[0].token_ids for output in small.generate(growing, GREEDY)]
    found["preemptions"] = small.service.num_preemptions
    return found


def main(output: str, *directories: str) -> None:
    found = {
        Path(directory).name: {"logits": logits(Path(directory)), "answers": answers(Path(directory))}
        for directory in directories
    }
    Path(output).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
