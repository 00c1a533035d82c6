"""From a model to an engine directory: calibrate, quantize layer by layer, compile, measure; then one rename."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from quasar_trt import __version__
from quasar_trt.builders import fidelity
from quasar_trt.builders.calibrate import CALIB_MAX_SEQ_LENGTH, CALIB_SIZE, Calibration, calibration_texts, read_dataset
from quasar_trt.builders.convert import Converter
from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.engine_dir import appearing_whole, check_output
from quasar_trt.builders.estimate import Estimate, estimate
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.source import Source, open_source
from quasar_trt.builders.targets import Compiler, check_memory, check_target
from quasar_trt.builders.tensorrt_llm_target import LlmHost, check_llm_model, compile_llm, finishing_lines
from quasar_trt.builders.tensorrt_target import compile_plans
from quasar_trt.builders.tokenizer_files import write_json
from quasar_trt.builders.write_checkpoint import write_checkpoint
from quasar_trt.checkpoint import checkpoint_spec
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.engines.reference import load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.fidelity_report import read_fidelity, show
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.model_config import ModelConfig, whole_number
from quasar_trt.recipe import Recipe
from quasar_trt.rope import longest_sequence, rope_type
from quasar_trt.tensor_parallel import rank_config
from quasar_trt.tensorfile import FileRecord, total_bytes
from quasar_trt.tensorrt_llm_stack import LLM_TARGET
from quasar_trt.tokenizer import load_tokenizer

MAX_DRAFT_LEN = 16


def build(
    model: str,
    output_dir: Path,
    recipe: Recipe,
    *,
    target: str = "cpu",
    sm: Sequence[int] = (),
    calib_dataset: Path | None = None,
    calib_size: int | None = None,
    calib_max_seq_length: int | None = None,
    seed: int = 0,
    tp_size: int = 1,
    max_batch_size: int = 16,
    max_seq_len: int | None = None,
    max_draft_len: int | None = None,
    trust_remote_code: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: bool = True,
) -> Manifest | Estimate:
    """Builds `model` (Hugging Face directory, GGUF file or hub id) into the engine directory `output_dir`.

    target: what the engine runs on, "cpu", one of `PLAN_TARGETS` or `LLM_TARGET`; sm: compute capabilities times ten of the GPUs
        that a plan is compiled for; "tensorrt" and `LLM_TARGET` compile for the machine's own. Where TensorRT-LLM cannot build,
        the directory has no engines, and the command that makes them elsewhere is printed.
    calib_dataset: .txt or .jsonl file; without it the model writes its own calibration text from `seed`, or, where it is too
        large for that, reads one that the package carries.
    calib_size, calib_max_seq_length: samples, and tokens of each; 16 and 256 when None, or as many as the model allows.
    seed: of all text that the model writes itself, for fidelity too.
    tp_size: ranks that the engine is for.
    max_seq_len: the model's own limit when None.
    max_draft_len: less than max_seq_len; 16 when None, or as many as that leaves.
    trust_remote_code: the source's own tokenizer code may run.
    dry_run: only the estimate is made, and returned.
    force: an engine directory already at `output_dir` is replaced, once the new one is whole.

    Raises QuasarError for input that cannot be built, and for a calibration option that an unquantized recipe has no use
    for. On any failure or interrupt nothing is left behind.
    """
    output_dir = Path(output_dir)
    compiler = check_target(target, recipe, tp_size, sm)
    recipe.refuse_unused(calib_dataset=calib_dataset, calib_size=calib_size, calib_max_seq_length=calib_max_seq_length)
    calib_size = whole_number("calib_size", CALIB_SIZE if calib_size is None else calib_size)
    for name, value in (("calib_max_seq_length", calib_max_seq_length), ("max_draft_len", max_draft_len)):
        if value is not None:
            whole_number(name, value)
    whole_number("seed", seed, least=0)
    whole_number("max_batch_size", max_batch_size)
    check_output(output_dir, force)
    texts = [] if calib_dataset is None else read_dataset(Path(calib_dataset))
    asked = _Lengths(max_seq_len, max_draft_len, calib_max_seq_length)
    source = open_source(
        str(model),
        check=lambda config: _check(config, recipe, tp_size, asked, target, compiler),
        trust_remote_code=trust_remote_code,
    )
    longest, lengths = asked.allowed(source.config)
    limits = Limits(max_batch_size, lengths.sequence, lengths.draft)
    calibration = Calibration(calib_dataset, texts, calib_size, lengths.calibration, seed)
    needs = estimate(
        source.config, recipe, tp_size, calib_size * calibration.length, limits, _num_plans(target, compiler)
    )
    with Stages(progress and not dry_run) as stages:
        if progress or dry_run:
            stages.say(str(needs))
        if dry_run:
            return needs
        check_memory(target, needs.memory, needs.gpu_memory)
        with appearing_whole(output_dir, force) as directory:
            manifest = _build(
                source, recipe, calibration, tp_size, limits, longest, directory, stages, target, compiler
            )
    if progress:
        show(read_fidelity(output_dir / "fidelity.json"), stages.console, manifest.calibration)
    for notice in source.notices:
        stages.say(f"note: {notice}")
    if isinstance(compiler, QuasarError):
        for line in finishing_lines(source.config, recipe, limits, output_dir, compiler):
            stages.say(line)
    return manifest


def _build(
    source: Source,
    recipe: Recipe,
    calibration: Calibration,
    tp_size: int,
    limits: Limits,
    longest: int,
    directory: Path,
    stages: Stages,
    target: str,
    compiler: Compiler,
) -> Manifest:
    """Fills `directory`, all but its fidelity.json where that is measured on request."""
    source.write_tokenizer(directory)
    tokenizer = _tokenizer(source, directory)
    measured = tp_size == 1  # one process runs one rank
    texts = calibration_texts(source, tokenizer, recipe, calibration, longest, directory.parent, stages, measured)
    converter = Converter(source)
    advance = stages.stage("Quantizing" if recipe.quantized else "Writing", source.config.num_hidden_layers)
    files, quantizer = write_checkpoint(
        converter, recipe, texts.calibration, directory / "checkpoint", advance, tp_size
    )
    if quantizer is not None:
        recipe = quantizer.recipe
    plan, compiled = None, {}
    if target == "cpu":
        compiled = _compile(source.config, recipe, tp_size, directory, stages)
    elif isinstance(compiler, LlmHost):
        plan, compiled = compile_llm(source.config, recipe, tp_size, limits, compiler, directory, stages)
    elif isinstance(compiler, tuple):
        advance = stages.stage("Compiling", tp_size * len(compiler))
        of_rank = rank_config(source.config, tp_size)
        plan, compiled = compile_plans(target, of_rank, recipe, limits, compiler, directory, advance)
    files |= compiled
    producer = {"quasar-trt": __version__} | {name: version(name) for name in ("torch", "transformers", "numpy")}
    described = {"path": source.path, "kind": source.kind, "notices": source.notices}
    seen = (
        quantizer
        and {"source": texts.origin, "samples": len(texts.calibration), "seed": calibration.seed} | quantizer.report()
    )
    manifest = Manifest(producer, target, limits, tp_size, recipe, described, seen, files, plan)
    manifest.write(directory)
    report = {"groups": {name: choice.report() for name, choice in quantizer.choices.items()}} if quantizer else {}
    if texts.unseen:
        windows = [ids[: limits.max_seq_len] for ids in texts.unseen]
        written = f"written by the source model (seed {texts.unseen_seed})"
        report = fidelity.measure(source, directory, windows, written, stages=stages) | report
    write_json(directory / "fidelity.json", report)
    return manifest


def _num_plans(target: str, compiler: Compiler) -> int | None:
    """Copies of the weights in plans, None for the CPU."""
    if target == "cpu":
        return None
    return len(compiler) if isinstance(compiler, tuple) else int(isinstance(compiler, LlmHost))


def _tokenizer(source: Source, directory: Path):
    """The tokenizer that was just written; None where the source has none."""
    if not (directory / "tokenizer.json").is_file():
        return None
    try:
        return load_tokenizer(directory)
    except QuasarError as error:
        why = str(error).replace(str(directory), source.path).removesuffix("; build the engine again")
        raise QuasarError(f"{why}; get an intact copy of the model") from None


def _check(
    config: ModelConfig, recipe: Recipe, tp_size: int, lengths: _Lengths, target: str, compiler: Compiler
) -> None:
    """Refuses what cannot be built from this configuration, before any weight is fetched or read."""
    checkpoint_spec(rank_config(config, tp_size), recipe)
    lengths.allowed(config)
    if target == LLM_TARGET:
        check_llm_model(config, recipe, compiler)


class _Lengths(NamedTuple):
    """Most tokens of a sequence, of a draft and of a calibration sample; None for a default that fits the model."""

    sequence: int | None
    draft: int | None
    calibration: int | None

    def allowed(self, config: ModelConfig) -> tuple[int, _Lengths]:
        """The most tokens that the model allows, and these lengths with defaults. Raises QuasarError for one that is too long."""
        longest = _longest(config, self.sequence)
        sequence = self.sequence or longest
        draft = min(MAX_DRAFT_LEN, sequence - 1) if self.draft is None else self.draft
        calibration = min(CALIB_MAX_SEQ_LENGTH, longest) if self.calibration is None else self.calibration
        if draft >= sequence:
            raise QuasarError(f"max_draft_len is {draft}; max_seq_len {sequence} allows 1 to {sequence - 1}")
        if calibration > longest:
            raise QuasarError(f"calib_max_seq_length is {calibration}; this model allows 1 to {longest}")
        return longest, _Lengths(sequence, draft, calibration)


def _longest(config: ModelConfig, max_seq_len: int | None) -> int:
    """The most tokens that the engines compute as the model does. Raises QuasarError when the sequences asked for, or by default
    the model's own, are longer."""
    longest = longest_sequence(config)
    if max_seq_len is not None and not 2 <= max_seq_len <= longest:
        dynamic = rope_type(config.rotary_scaling) == "dynamic"
        why = " (beyond, rope type 'dynamic' changes the rows before, which is not supported)" if dynamic else ""
        raise QuasarError(f"max_seq_len is {max_seq_len}; this model allows 2 to {longest}{why}")
    window = config.sliding_window
    if window is not None and (max_seq_len or longest) > window:
        raise QuasarError(
            f"{config.architecture} has sliding_window = {window} in use, and only full attention is supported; up to {window} "
            f"tokens both are the same: set max_seq_len to {window} or less"
        )
    return min(longest, window or longest)


def _compile(
    config: ModelConfig, recipe: Recipe, tp_size: int, directory: Path, stages: Stages
) -> dict[str, FileRecord]:
    """Packs each rank's checkpoint for the CPU."""
    of_rank = rank_config(config, tp_size)
    advance = stages.stage("Packing", tp_size * total_bytes(packed_spec(of_rank, recipe).values()))
    return {
        f"rank{rank}.engine": compile_cpu(
            of_rank,
            recipe,
            load_tensors(directory / "checkpoint" / f"rank{rank}.safetensors"),
            directory / f"rank{rank}.engine",
            advance,
            rank,
        )
        for rank in range(tp_size)
    }
