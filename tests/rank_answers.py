"""Greedy answers to some prompts, plain and drafted; as a program, on several ranks.

mpirun -n N python rank_answers.py OUTPUT.pickle PROMPTS.json ENGINE_DIR...
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_steps import rows_of

from quasar_trt.drafters.base import Draft
from quasar_trt.engines.base import SequenceStep
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=32, logprobs=2)


def answers(prompts: Path, directories: Sequence[Path]) -> dict[str, dict]:
    """Name of a directory -> ids "plain" and "drafted", of the plain ones the "gaps" between the two best logits, and the
    "logits" of the first prompt."""
    found = {}
    for directory in directories:
        runner = Runner.from_dir(directory, drafter=None, engine="cpu", threads=1)
        texts = json.loads(prompts.read_text())
        ids = [runner.chat_ids([{"role": "user", "content": text}]) for text in texts]
        plain = [output.outputs[0] for output in runner.generate(ids, GREEDY)]
        drafted = Runner.from_dir(directory, drafter="suffix", engine="cpu", threads=1).generate(ids, GREEDY)
        first = ids[0][:48]
        batch = [SequenceStep(runner.engine.open(), first[:1], Draft(tuple(first[1:])))]
        found[directory.name] = {
            "plain": [output.token_ids for output in plain],
            "drafted": [output.outputs[0].token_ids for output in drafted],
            "gaps": [[_gap(entry) for entry in output.logprobs] for output in plain],
            "logits": rows_of(runner.engine, batch)[0],
        }
    return found


def _gap(entry: dict) -> float:
    best, second = sorted((each.logprob for each in entry.values()), reverse=True)[:2]
    return best - second


if __name__ == "__main__":
    output, prompts, *directories = map(Path, sys.argv[1:])
    output.write_bytes(pickle.dumps(answers(prompts, directories)))
