"""The command line: both spellings, help without heavy imports, one line per error, streams and exit codes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from quasar_trt.cli import cli
from quasar_trt.errors import QuasarError
from quasar_trt.recipe import Recipe

ENVIRONMENT = os.environ | {"COLUMNS": "100"}


def quasar_trt(*args: str | Path, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "quasar_trt.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, **options)


def assert_refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    """Exit code 1, nothing on stdout, one line on stderr that holds every one of `parts`."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("code", ["import quasar_trt", "import quasar_trt.cli"])
def test_import_loads_no_heavy_package(code):
    check = f"{code}; import sys; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_help_loads_no_heavy_package_and_lists_every_command():
    check = (
        "import sys; from quasar_trt.cli import cli; sys.argv = ['quasar-trt', '--help']; cli(standalone_mode=False); "
        "print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")
    for command in ("build", "generate", "chat", "bench", "eval", "info"):
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "build",
        "generate",
        "chat",
        "bench",
        "bench cells",
        "bench drafters",
        "bench kernels",
        "bench requests",
        "serve",
        "info",
    ],
)
def test_help_of_each_command_fits_the_terminal(command):
    result = quasar_trt(*command.split(), "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "torch" not in result.stdout


def test_no_argument_shows_help():
    result = quasar_trt()
    assert result.returncode == 0 and result.stdout.startswith("Usage: quasar-trt ")


def test_version():
    assert quasar_trt("--version").stdout == "quasar-trt 0.1.0\n"


def test_defaults_shown_are_those_of_the_dataclasses():
    text = quasar_trt("generate", "--help").stdout
    assert "[suffix|ngram|recycle|engine:DIR|medusa:DIR|eagle:DIR|none]" in text
    assert "[default: 16]" in text and "[default: 1.0]" in text
    assert "[default: 16]" not in quasar_trt("chat", "--help").stdout


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


# An option's type -> what it does not take, and what it says is allowed.
WRONG = {
    "Whole": (["abc", "1.5", ""], "a whole number"),
    "Real": (["abc", ""], "a number"),
    "Numbers": (["abc", "1,,2", ""], "numbers with commas between them"),
    "Bytes": (["abc", "1.5", ""], "bytes, or a number with K, M or G behind it"),
    "TokenBias": (["abc", "1=", "=1", ""], "ID=BIAS, a token id and a number"),
    "OptionPair": (["abc", "=1", ""], "KEY=VALUE"),
    "Choice": (["abc", ""], None),
    "_Path": ([""], "a path"),
}
UNCHECKED = {"StringParamType", "Names", "RegistryName", "BoolParamType"}  # which what takes them checks, and flags


def test_wrong_value_of_any_option_is_named_with_what_is_allowed():
    seen = set()
    for path, command in commands():
        for option in command.params:
            kind = type(option.type).__name__
            seen.add(kind)
            for value in WRONG[kind][0] if kind not in UNCHECKED and isinstance(option, click.Option) else ():
                result = CliRunner().invoke(cli, [*path, option.opts[0], value])
                assert isinstance(result.exception, QuasarError), (path, option.opts, value)
                if kind == "Choice":
                    assert str(result.exception).startswith(
                        f"unknown {option.opts[0]} '{value}'; one of: {', '.join(sorted(option.type.choices))}"
                    )
                else:
                    assert str(result.exception).startswith(f"{option.opts[0]} is '{value}'; allowed: {WRONG[kind][1]}")
    assert seen == UNCHECKED | set(WRONG)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "d", "p", "--threads", "0"], "--threads is '0'; allowed: a whole number of at least 1"),
        (["serve", "d", "--port", "65536"], "--port is '65536'; allowed: a whole number of at least 0, at most 65535"),
        (["eval", "fidelity", "d", "--tokens", "1"], "--tokens is '1'; allowed: a whole number of at least 2"),
        (["info", ""], "ENGINE_DIR is ''; allowed: a path"),
    ],
)
def test_value_beyond_its_bounds_is_named_with_them(args, message):
    assert str(CliRunner().invoke(cli, args).exception) == message


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["biuld"], ["unknown command 'biuld'", "did you mean 'build'?"]),
        (["build", "m", "--output-dirr", "x"], ["unknown option '--output-dirr'", "did you mean '--output-dir'?"]),
        (["build", "m", "--output_dirr", "x"], ["did you mean '--output-dir'?"]),
        (["build", "--output-dir", "x"], ["quasar-trt build: MODEL is missing; see quasar-trt build --help"]),
        (["build", "m"], ["--output-dir is missing; see quasar-trt build --help"]),
        (["build", "m", "n", "--output-dir", "x"], ["extra argument (n); see quasar-trt build --help"]),
        (["build", "m", "--output-dir", ""], ["--output-dir is ''; allowed: a path"]),
        (["build", "m", "--output-dir"], ["--output-dir", "requires an argument"]),
        (["build", "m", "--output-dir", "x", "--quantization", "int9"], ["int9", "int8", "none"]),
        (["build", "m", "--output-dir", "x", "--smoothquant", "1.5"], ["smoothquant is 1.5", "0 to 1"]),
        (["build", "m", "--output-dir", "x", "--smoothquant", "high"], ["--smoothquant", "high"]),
        (["build", "m", "--output-dir", "x", "--quantization", "none", "--quantize-lm-head"], ["lm_head has no use"]),
        (
            ["build", "m", "--output-dir", "x", "--quantize-lm-head", "--lm-head", "rescored"],
            ["quantize_lm_head means lm_head 'int8'", "'rescored'"],
        ),
        (["build", "m", "--output-dir", "x", "--lm-head", "int4"], ["int4", "bf16", "int8", "rescored"]),
        (["build", "m", "--output-dir", "x", "--quantization", "none", "--rotate"], ["rotate has no use"]),
        (["build", "m", "--output-dir", "x", "--quantization", "none", "--exclude", "*"], ["exclude has no use"]),
        (["build", "m", "--output-dir", "x", "--rounding", "up"], ["up", "gptq", "nearest"]),
        (["build", "m", "--output-dir", "x", "--activations", "4"], ["activations is 4; allowed: 8, 16"]),
        (["build", "m", "--output-dir", "x", "--exclude", ""], ["exclude is ('',)"]),
        (["build", "/does/not/exist", "--output-dir", "x"], ["/does/not/exist"]),
        (["info", "/does/not/exist"], ["/does/not/exist", "quasar-trt build"]),
        (["info", "--verify"], ["--verify", "ENGINE_DIR"]),
        (["generate", "/does/not/exist", "hello"], ["/does/not/exist"]),
        (["generate", "/does/not/exist"], ["quasar-trt generate: PROMPT is missing"]),
        (["generate", "d", "hello", "--temperature", "-1"], ["temperature is -1.0"]),
        (["generate", "d", "hello", "--top_p", "0"], ["top_p is 0.0"]),
        (["generate", "d", "hello", "--max-tokens", "0"], ["max_tokens is 0"]),
        (["generate", "d", "hello", "--logit_bias", "5"], ["--logit-bias is '5'", "ID=BIAS"]),
        (["generate", "d", "hello", "--n", "2", "--temperature", "0"], ["n is 2"]),
        (["generate", "d", "hello", "--min-tokens", "20"], ["min_tokens is 20", "max_tokens"]),
        (["chat", "d", "--repetition_penalty", "0"], ["repetition_penalty is 0.0"]),
        (["chat", "/does/not/exist"], ["/does/not/exist"]),
        (["chat", "/does/not/exist", "--min-tokens", "20"], ["/does/not/exist"]),  # without bound, as it is by default
        (["generate", "d", "hello", "--threads", "0"], ["--threads"]),
        (["generate", "d", "hello", "--drafter-option", "five"], ["'five'", "KEY=VALUE"]),
        (["bench"], ["quasar-trt bench cells: --int8 is missing"]),
        (["bench", "kernel"], ["unknown command 'kernel'", "did you mean 'kernels'?"]),
        (["bench", "--int8", "d", "--bf16", "d"], ["--prompts or --random-prompts is missing; see"]),
        (["bench", "--int8", "d", "--bf16", "d", "--random-prompts", "-1"], ["random_prompts is -1", "at least 0"]),
        (
            ["bench", "--int8", "d", "--bf16", "d", "--random-prompts", "1", "--plot", "p.jpg"],
            ["--plot", "p.jpg", ".png"],
        ),
        (["bench", "kernels", "--engine", "/does/not/exist"], ["/does/not/exist"]),
        (["bench", "kernels", "--rows", "1,two"], ["--rows", "1,two", "numbers with commas"]),
        (["bench", "kernels", "--rows", "2,3"], ["rows are 2,3", "1, and others up to 256"]),
        (["bench", "kernels", "--markdown", "none/k.md"], ["--markdown", "directory none does not exist"]),
        (["bench", "--int8", "d", "--bf16", "d", "--prompts", "/does/not/exist"], ["/does/not/exist"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and len(value) > 1 else None,
)
def test_bad_input_is_one_line(args, parts, tmp_path):
    assert_refused(quasar_trt(*args, cwd=tmp_path), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["info"]], ids=" ".join)
def test_a_full_device_is_one_line(args):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quasar_trt.cli", *args]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False)
    assert (result.returncode, result.stderr) == (1, "error: No space left on device\n")


def test_a_text_that_looks_like_an_option_is_told_apart_by_two_hyphens(tmp_path):
    result = quasar_trt("generate", "d", "-5 plus 3", cwd=tmp_path)
    assert_refused(result, "unknown option '-5'", "put -- before a text that begins with '-'")
    assert_refused(quasar_trt("generate", "/does/not/exist", "--", "-5 plus 3"), "/does/not/exist")


@pytest.mark.parametrize("place", ["", "none/bench.json"], ids=["directory", "missing directory"])
def test_bench_refuses_a_place_for_its_output_before_the_run(place, tmp_path):
    result = quasar_trt("bench", "--int8", "d", "--bf16", "d", "--prompts", "none", "--output", tmp_path / place)
    assert_refused(result, "--output", str(tmp_path))


def test_info_describes_this_machine():
    result = quasar_trt("info")
    assert result.returncode == 0 and result.stderr == ""
    for label in ("processor", "native engine", "compiler", "GPU", "MPI", "tensorrt-llm"):
        assert label in result.stdout


def test_info_survives_an_empty_path(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "quasar_trt.cli", "info"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path), "COLUMNS": "100"},
        check=True,
    )
    assert "none found (g++" in result.stdout and "no mpirun on PATH" in result.stdout


def test_closed_pipe_is_no_traceback():
    process = subprocess.run(
        f"{sys.executable} -m quasar_trt.cli info | head -n 1", shell=True, capture_output=True, text=True, check=True
    )
    assert process.stdout.count("\n") == 1 and process.stderr == ""


def test_both_spellings_build_an_engine_that_info_describes(hf_dir, tmp_path):
    directory = tmp_path / "engine"
    small = ["--calib_size", "2", "--calib-max-seq-length", "16"]
    built = quasar_trt("build", hf_dir, "--output_dir", directory, *small, "--quantize_lm_head", "--smoothquant=0.6")
    assert built.returncode == 0, built.stderr
    described = quasar_trt("info", directory, "--verify")
    assert described.returncode == 0, described.stderr
    for part in ("LlamaForCausalLM", "alpha 0.6", "INT8 head", "rank0.engine", "top-1 agreement", "has the sha256"):
        assert part in described.stdout
    assert max(map(len, described.stdout.splitlines())) <= 100
    assert_refused(quasar_trt("build", hf_dir, "--output-dir", directory, *small), str(directory), "--force")


def test_verify_finds_an_altered_weight(engine_dirs, tmp_path):
    directory = tmp_path / "engine"
    shutil.copytree(engine_dirs["INT8"], directory)
    file = directory / "rank0.engine"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert quasar_trt("info", directory).returncode == 0  # sizes and headers are as they were
    result = quasar_trt("info", directory, "--verify")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "rank0.engine" in result.stderr and "sha256" in result.stderr


def test_generate_streams_text_and_a_summary(engine_dirs):
    common = [engine_dirs["INT8"], "abcabcabc", "--temperature", "0", "--max_tokens", "24", "--ignore-eos"]
    drafted = quasar_trt("generate", *common, "--drafter-option", "num-speculative-tokens=3")
    assert drafted.returncode == 0 and drafted.stdout
    assert "mean acceptance length = " in drafted.stderr.splitlines()[-1]
    plain = quasar_trt("generate", *common, "--drafter", "none", "--no-stats")
    assert plain.stdout == drafted.stdout and "acceptance" not in plain.stderr
    by_engine = quasar_trt("generate", *common, "--drafter", f"engine:{engine_dirs['BF16']}")
    assert by_engine.stdout == drafted.stdout and "mean acceptance length = " in by_engine.stderr


def test_generate_reads_stdin_and_uses_the_chat_template(engine_dirs):
    common = [engine_dirs["BF16"], "--seed", "5", "--no-stats"]
    chat = quasar_trt("generate", *common, "--chat", "--", "-", input="hello")
    spelled_out = quasar_trt("generate", *common, "user: hello\nassistant:")
    assert chat.returncode == spelled_out.returncode == 0
    assert chat.stdout == spelled_out.stdout


def test_a_closed_standard_input_is_one_line(engine_dirs):
    command = f"{sys.executable} -m quasar_trt.cli generate {engine_dirs['INT8']} - <&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert_refused(result, "standard input", "closed")


def test_a_standard_input_that_is_no_text_is_one_line(engine_dirs):
    command = [sys.executable, "-m", "quasar_trt.cli", "generate", str(engine_dirs["INT8"]), "-"]
    strict = ENVIRONMENT | {"PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(command, input=b"\xff\xfe", capture_output=True, env=strict, check=False)
    assert result.returncode == 1 and result.stdout == b""
    assert result.stderr.startswith(b"error: standard input is not utf-8 text") and result.stderr.count(b"\n") == 1


def test_generate_says_when_the_context_ends_before_max_tokens(hf_dir, tmp_path):
    directory = tmp_path / "small"
    options = ["--quantization", "none", "--max-seq-len", "32"]
    assert quasar_trt("build", hf_dir, "--output-dir", directory, *options).returncode == 0
    common = [directory, "x" * 20, "--ignore-eos", "--no-stats", "--temperature", "0"]
    cut = quasar_trt("generate", *common, "--max-tokens", "100")
    assert cut.returncode == 0
    assert "at the engine's max_seq_len of 32" in cut.stderr
    assert quasar_trt("generate", *common, "--max-tokens", "5").stderr == ""


def test_generate_with_the_reference_engine(engine_dirs):
    result = quasar_trt("generate", engine_dirs["BF16"], "hello", "--engine", "reference", "--threads", "1")
    assert result.returncode == 0 and "tokens/s" in result.stderr


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--drafter", "ngramm"], ["unknown drafter 'ngramm'", "did you mean 'ngram'?"]),
        (
            ["--drafter", "lookahead"],
            ["unknown drafter 'lookahead'", "one of: eagle:DIR, engine:DIR, medusa:DIR, ngram, none, recycle, suffix"],
        ),
        (["--drafter", "eagle:nowhere"], ["cannot read nowhere/config.json"]),
        (["--drafter", "engine"], ["drafter is 'engine'", "engine:DIR"]),
        (["--drafter", "engine:nowhere"], ["engine directory nowhere does not exist", "quasar-trt build"]),
        (["--engine", "tensorrt"], ["was built for target 'cpu'", "runs targets tensorrt, tensorrt-rtx"]),
        (["--drafter-option", "num_speculative_tokens=true"], ["num_speculative_tokens is True", "an integer"]),
        (["--engine", "cpuu"], ["unknown engine 'cpuu'", "did you mean 'cpu'?"]),
        (["--drafter-option", "num_tokens=3"], ["unknown suffix drafter option 'num_tokens'"]),
        (["--drafter-option", "num_speculative_tokens=many"], ["num_speculative_tokens is 'many'"]),
        (["--drafter", "none", "--drafter-option", "num_speculative_tokens=3"], ["without a drafter"]),
        (["--temprature", "0"], ["did you mean '--temperature'?"]),
    ],
    ids=" ".join,
)
def test_bad_generation_input_is_one_line(args, parts, engine_dirs):
    assert_refused(quasar_trt("generate", engine_dirs["INT8"], "hello", *args), *parts)


def test_a_prompt_longer_than_the_engine_is_one_line(engine_dirs):
    result = quasar_trt("generate", engine_dirs["INT8"], "-", "--engine", "reference", input="x" * 600)
    assert_refused(result, "600 tokens", "511", "--max-seq-len")


def test_bench_prints_tables_and_saves_json_markdown_and_a_picture(engine_dirs, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    prompts.write_text(json.dumps({"task": "chat", "prompt": "abcabc"}) + "\n")
    engines = ["--int8", engine_dirs["INT8"], "--bf16", engine_dirs["BF16"]]
    sizes = ["--max_tokens", "8", "--repeats", "1", "--threads", "1", "--ignore-eos"]
    markdown, plot = tmp_path / "bench.md", tmp_path / "bench.png"
    files = ["--output", output, "--markdown", markdown, "--plot", plot]
    result = quasar_trt("bench", *engines, "--prompts", prompts, *sizes, *files)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    for cell in ("BF16 plain", "BF16 drafted", "INT8 plain", "INT8 drafted"):
        assert cell in result.stdout
    values = json.loads(output.read_text())
    assert values["options"]["max_tokens"] == 8 and len(values["runs"]) == 4
    assert (
        markdown.read_text().startswith("### four cells\n\n| cell |") and "\n| INT8 drafted |" in markdown.read_text()
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    missing = tmp_path / "none" / "bench.json"
    assert_refused(quasar_trt("bench", *engines, "--prompts", prompts, "--output", missing), str(missing.parent))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_with_its_exit_code_and_without_traceback(engine_dirs, number, code):
    command = ["generate", str(engine_dirs["INT8"]), "--max-tokens", "400", "--ignore-eos", "hello", "-"]
    process = subprocess.Popen(
        [sys.executable, "-m", "quasar_trt.cli", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)  # it generates, or has come to the second prompt, which never arrives
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == code and b"Traceback" not in stderr


@pytest.fixture
def built(monkeypatch) -> list[tuple[Recipe, dict]]:
    """The recipe and the other options of each build that the command asked for, instead of a build."""
    calls = []
    monkeypatch.setattr(
        "quasar_trt.builders.build.build", lambda model, out, recipe, **options: calls.append((recipe, options))
    )
    return calls


@pytest.mark.parametrize(
    ("args", "recipe", "options"),
    [
        ([], {}, {}),
        (["--no-rotate"], {"rotate": False}, {}),
        (["--rotate", "--smoothquant", "0.5"], {"rotate": True, "smoothquant": 0.5}, {}),
        (["--rounding", "nearest"], {"rounding": "nearest"}, {}),
        (["--activations", "16"], {"activations": 16}, {}),
        (["--exclude", "*.layers.0.*", "--exclude", "*.mlp.proj"], {"exclude": ("*.layers.0.*", "*.mlp.proj")}, {}),
        (["--quantize_lm_head"], {"lm_head": "int8"}, {}),
        (["--lm_head", "rescored"], {"lm_head": "rescored"}, {}),
        (["--quantize-lm-head", "--no_rotate"], {"lm_head": "int8", "rotate": False}, {}),
        (["--quantization", "none"], {"quantization": "none"}, {}),
        (["--tp_size", "2", "--dry_run"], {}, {"tp_size": 2, "dry_run": True}),
        (["--tp-size", "2", "--dry-run"], {}, {"tp_size": 2, "dry_run": True}),
        (["--trust_remote_code", "--force"], {}, {"trust_remote_code": True, "force": True}),
        (["--calib_dataset", "a.txt"], {}, {"calib_dataset": Path("a.txt")}),
        (["--calib_size", "3", "--calib-max-seq_length=9"], {}, {"calib_size": 3, "calib_max_seq_length": 9}),
        (["--max_batch_size", "2", "--max_seq_len", "64"], {}, {"max_batch_size": 2, "max_seq_len": 64}),
        (["--max_draft_len", "4", "--seed", "7"], {}, {"max_draft_len": 4, "seed": 7}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_build_options_reach_the_builder(args, recipe, options, built):
    result = CliRunner().invoke(cli, ["build", "m", "--output_dir", "x", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    ((found, given),) = built
    assert found == Recipe(**recipe)
    assert {name: given[name] for name in options} == options
    assert all(
        given[name] in (None, False)
        for name in ("calib_dataset", "calib_size", "dry_run", "force")
        if name not in options
    )


def test_build_defaults_are_those_of_the_builder():
    from quasar_trt.builders.build import MAX_DRAFT_LEN
    from quasar_trt.builders.build import build as builder
    from quasar_trt.builders.calibrate import CALIB_MAX_SEQ_LENGTH, CALIB_SIZE
    from quasar_trt.cli import build

    shown = {parameter.name: parameter.default for parameter in build.params}
    defaults = {name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()}
    numbers = {name: value for name, value in defaults.items() if type(value) is int}
    assert numbers == {name: shown[name] for name in numbers}
    assert set(defaults) - {"recipe", "progress"} <= set(shown)
    assert {field.name for field in dataclasses.fields(Recipe)} - {"weight_only"} <= set(shown)  # which a build lists
    text = {parameter.name: parameter.help for parameter in build.params if hasattr(parameter, "help")}
    assert f"{CALIB_SIZE} by default" in text["calib_size"]
    assert f"{CALIB_MAX_SEQ_LENGTH} by default" in text["calib_max_seq_length"]
    assert f"{MAX_DRAFT_LEN} by default" in text["max_draft_len"]


def test_a_dry_run_prints_the_estimate_and_writes_nothing(hf_dir, tmp_path):
    result = CliRunner().invoke(cli, ["build", str(hf_dir), "--output_dir", str(tmp_path / "engine"), "--dry_run"])
    assert result.exit_code == 0
    assert re.fullmatch(r"needs about [\d.]+ GB of memory and [\d.]+ GB of disk \(.*\).*\n", result.output)
    assert list(tmp_path.iterdir()) == []
