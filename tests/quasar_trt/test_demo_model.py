"""The real demo model: what the product promises, on the prompts of the demo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quasar_trt.drafters.base import Draft
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import open_engine
from quasar_trt.engines.base import Acceptance, SequenceStep
from quasar_trt.engines.cpu import CpuEngine
from quasar_trt.engines.reference import ReferenceEngine
from quasar_trt.recipe import Recipe
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
RECIPES = {
    "int8": Recipe(),
    "int8-head": Recipe(lm_head="int8"),
    "bf16": Recipe("none"),
}
ENGINES = list(RECIPES)


@pytest.fixture(scope="module")
def engine_dirs(demo_gguf, tmp_path_factory) -> dict[str, Path]:
    from quasar_trt.builders.build import build

    root = tmp_path_factory.mktemp("demo")
    for name, recipe in RECIPES.items():
        build(str(demo_gguf), root / name, recipe, progress=False)
    return {name: root / name for name in RECIPES}


@pytest.fixture(scope="module")
def prompts(engine_dirs) -> list[list[int]]:
    """Ids of the demo's twenty prompts, as chat."""
    runner = Runner.from_dir(engine_dirs["int8"])
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    return [runner.chat_ids([{"role": "user", "content": text}]) for text in texts]


@pytest.fixture(scope="module")
def completions(engine_dirs, prompts):
    """(engine, draft length, params) -> ids of every prompt, and the runner's metrics; computed once. Drafts are verified
    whole, whether they pay or not."""
    known = {}

    def complete(name: str, length: int, params: SamplingParams):
        key = name, length, params.temperature
        if key not in known:
            directory = engine_dirs[name]
            drafter = make_drafter("suffix", {"num_speculative_tokens": length}) if length else None
            runner = Runner(open_engine(directory), tokenizer=directory, drafter=drafter)
            outputs = runner.generate(prompts, params)
            known[key] = [output.outputs[0].token_ids for output in outputs], runner.stats
        return known[key]

    return complete


GREEDY = SamplingParams(temperature=0, max_tokens=128)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=5, max_tokens=128)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_greedy_drafted_ids_equal_plain_ids(completions, name, length):
    plain, _ = completions(name, 0, GREEDY)
    drafted, metrics = completions(name, length, GREEDY)
    assert drafted == plain
    assert metrics.num_accepted_tokens > 100  # drafts were really accepted, and rejected
    assert metrics.acceptance_rate < 1


@pytest.mark.parametrize("length", [1, 5, 8])
@pytest.mark.parametrize("name", ENGINES)
def test_sampled_drafted_ids_equal_plain_ids(completions, name, length):
    plain, _ = completions(name, 0, SAMPLED)
    assert completions(name, length, SAMPLED)[0] == plain
    assert plain != completions(name, 0, GREEDY)[0]


def test_one_thread_and_one_request_at_a_time_give_the_same_ids(completions, engine_dirs, prompts):
    batched, _ = completions("int8", 5, GREEDY)
    runner = Runner.from_dir(engine_dirs["int8"], threads=1)
    for index in (0, 7, 13):
        assert runner.generate(prompts[index], GREEDY)[0].outputs[0].token_ids == batched[index]


def test_completions_end_with_the_end_of_sequence_id_or_at_max_tokens(completions):
    for ids in completions("int8", 5, GREEDY)[0]:
        assert 2 not in ids[:-1]
        assert ids[-1] == 2 or len(ids) == 128


@pytest.mark.parametrize(
    ("name", "kl", "top1"), [("int8", 0.007, 0.94), ("int8-head", 0.008, 0.94), ("bf16", 0.0005, 0.985)]
)
def test_fidelity_is_measured_and_good(engine_dirs, name, kl, top1):
    fidelity = json.loads((engine_dirs[name] / "fidelity.json").read_text())
    assert 0 < fidelity["kl"] < kl
    assert top1 < fidelity["top1_agreement"] <= 1
    assert fidelity["tokens"] >= 1000


def logits_of(engine, ids) -> np.ndarray:
    """Logits of every row of one sequence."""
    rows = []

    def accept(index, logits):
        rows.append(logits.copy())
        return Acceptance((0,), len(ids) - 1)

    engine.step([SequenceStep(engine.open(), ids[:1], Draft(tuple(ids[1:])))], accept)
    return rows[0]


def test_cpu_engine_agrees_with_the_reference_engine(engine_dirs, prompts):
    ids = prompts[4][:96]
    cpu = {name: logits_of(CpuEngine(engine_dirs[name] / "rank0.engine", max_seq_len=256), ids) for name in ENGINES}
    reference = {name: logits_of(ReferenceEngine.from_dir(engine_dirs[name]), ids) for name in ENGINES}
    assert np.abs(cpu["bf16"] - reference["bf16"]).mean() < 0.03
    # Sums in another order move some codes by one step, and the layers amplify that, but never to the quantization's own error.
    quantization = np.abs(reference["int8"] - reference["bf16"]).mean()
    for name in ("int8", "int8-head"):
        assert np.abs(cpu[name] - reference[name]).mean() < quantization
        assert (cpu[name].argmax(1) == reference[name].argmax(1)).mean() > 0.9
        assert np.abs(cpu[name][0] - reference[name][0]).max() < 0.05  # a first row is shallow: few codes move
