"""Every program under examples/ runs and prints what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quasar_trt import Runner, SamplingParams
from quasar_trt.drafters.registry import make_drafter

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *args: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_first(engine_dirs):
    lines = run("first.py", engine_dirs["INT8"]).splitlines()
    assert lines[0].startswith("'The capital of France is' -> ")
    assert lines[-1].startswith("mean acceptance length ")


def test_first_is_the_program_of_the_readme():
    program = (EXAMPLES / "first.py").read_text().split("\n\n", 1)[1].replace("import sys\n\n", "")
    program = program.replace("if len(sys.argv) != 2:\n    sys.exit(__doc__)\n", "")
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert program.replace("sys.argv[1]", '"int8"').strip() in readme


def test_stream(engine_dirs):
    assert run("stream.py", engine_dirs["INT8"], "hello").strip()


def test_many(engine_dirs):
    lines = run("many.py", engine_dirs["INT8"], "hello", "one two").splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["'hello'", "'one two'"]
    assert lines[2].startswith("2 requests, first token after ")


def test_same_tokens(engine_dirs):
    assert run("same_tokens.py", engine_dirs["INT8"]).endswith("the same tokens each time\n")


def test_trained_heads_are_drafters(deep_dirs, tmp_path):
    small = ("--texts", "6", "--max-tokens", "12", "--heads", "2", "--draft-vocab-size", "90")
    lines = run("train_heads.py", deep_dirs["INT8"], tmp_path / "heads", *small).splitlines()
    assert lines[0].startswith("6 texts, ") and lines[-1].startswith("saved ")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    opened = Runner.from_dir(deep_dirs["INT8"], drafter=None, threads=1)
    plain = opened.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    for name in ("medusa", "eagle"):
        runner = Runner(opened.engine, drafter=make_drafter(f"{name}:{tmp_path / 'heads' / name}"))
        assert runner.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == plain
        assert runner.stats.num_draft_tokens


@pytest.mark.parametrize("name", ["first.py", "stream.py", "same_tokens.py", "many.py", "train_heads.py"])
def test_without_arguments_an_example_tells_its_usage(name):
    result = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"python examples/{name} ENGINE_DIR" in result.stderr and "Traceback" not in result.stderr


def test_every_example_has_a_test():
    tested = {"first.py", "stream.py", "same_tokens.py", "many.py", "train_heads.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_prompts_are_twenty_of_five_kinds():
    from quasar_trt.bench.prompts import load_prompts

    tasks = [prompt.task for prompt in load_prompts(EXAMPLES / "prompts.jsonl")]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        ("chat", "code", "extraction", "summary", "translation"), 4
    )
