"""From a model to an engine directory: convert, calibrate, smooth, quantize, compile, measure; then one rename."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from quasar_trt import __version__
from quasar_trt.builders import fidelity
from quasar_trt.builders.calibrate import ChannelMaxima, dataset_ids
from quasar_trt.builders.convert import convert
from quasar_trt.builders.cpu_target import compile_cpu
from quasar_trt.builders.progress import Stages
from quasar_trt.builders.search import search_smoothers
from quasar_trt.builders.self_text import SelfText, new_texts, source_engine, write
from quasar_trt.builders.smooth import count_extremes, textbook_smoothers
from quasar_trt.builders.source import Source, open_source
from quasar_trt.builders.tokenizer_files import write_json
from quasar_trt.builders.write_checkpoint import write_checkpoint
from quasar_trt.checkpoint import checkpoint_spec
from quasar_trt.engines import open_engine
from quasar_trt.engines.cpu_layout import packed_spec
from quasar_trt.engines.reference import ReferenceModel, load_tensors
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Limits, Manifest
from quasar_trt.model_config import ModelConfig, whole_number
from quasar_trt.recipe import Recipe
from quasar_trt.rope import longest_sequence, rope_type
from quasar_trt.tokenizer import load_tokenizer

# Fidelity is measured on text from this many seeds further on, which calibration cannot have seen.
_FIDELITY_SEED = 1_000_003
_FIDELITY_SAMPLES, _FIDELITY_LENGTH = 8, 128
_CALIBRATION_ROWS = 1024  # per pass: few large products rather than many small ones
_CALIB_SIZE, _CALIB_MAX_SEQ_LENGTH = 16, 256


def build(
    model: str,
    output_dir: Path,
    recipe: Recipe,
    *,
    calib_dataset: Path | None = None,
    calib_size: int | None = None,
    calib_max_seq_length: int | None = None,
    seed: int = 0,
    max_batch_size: int = 16,
    max_seq_len: int | None = None,
    max_draft_len: int = 16,
    force: bool = False,
    progress: bool = True,
) -> Manifest:
    """Builds `model` (Hugging Face directory, GGUF file or hub id) into the engine directory `output_dir`.

    calib_dataset: .txt or .jsonl file; without it the model writes its own calibration text from `seed`.
    calib_size, calib_max_seq_length: samples, and tokens of each; 16 and 256 when None.
    seed: of all text that the model writes itself, for fidelity too.
    max_seq_len: the model's own limit when None.
    force: an engine directory already at `output_dir` is replaced, once the new one is whole.

    Raises QuasarError for input that cannot be built, and for a calibration option that an unquantized recipe has no use
    for. On any failure or interrupt nothing is left behind.
    """
    output_dir = Path(output_dir)
    recipe.refuse_unused(calib_dataset=calib_dataset, calib_size=calib_size, calib_max_seq_length=calib_max_seq_length)
    calib_size = whole_number("calib_size", _CALIB_SIZE if calib_size is None else calib_size)
    calib_max_seq_length = whole_number(
        "calib_max_seq_length", _CALIB_MAX_SEQ_LENGTH if calib_max_seq_length is None else calib_max_seq_length
    )
    whole_number("seed", seed, least=0)
    whole_number("max_batch_size", max_batch_size)
    whole_number("max_draft_len", max_draft_len)
    _check_output(output_dir, force)
    source = open_source(str(model))
    longest = _longest(source.config, max_seq_len)
    limits = Limits(max_batch_size, max_seq_len or longest, max_draft_len)
    sample_length = min(calib_max_seq_length, longest)
    with _appearing_whole(output_dir, force) as directory:
        source.write_tokenizer(directory)
        tokenizer = load_tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
        given = _dataset(source, calib_dataset, tokenizer, calib_size, sample_length) if recipe.quantized else []
        with Stages(progress) as stages:
            tensors = convert(source, stages.stage("Reading the model", source.config.num_hidden_layers))
            size = 0 if given or not recipe.quantized else calib_size
            scratch = directory.parent
            own, unseen = _self_texts(source, tensors, tokenizer, size, sample_length, longest, seed, scratch, stages)
            smoothers, choices, calibration = {}, {}, None
            if recipe.quantized:
                samples = given or own
                if recipe.smoothquant is None:
                    advance = stages.stage("Smoothing", source.config.num_hidden_layers)
                    choices, observer = search_smoothers(source.config, tensors, samples, advance)
                    smoothers = {name: choice.smoother for name, choice in choices.items()}
                else:
                    observer = _observe(source.config, tensors, samples, stages)
                    smoothers = textbook_smoothers(source.config, recipe.smoothquant, tensors, observer.maxima)
                origin = str(calib_dataset) if given else "self-generated"
                calibration = {"source": origin, "samples": len(samples), "tokens": observer.rows, "seed": seed}
                calibration |= observer.report() | count_extremes(source.config, tensors, smoothers)
            files = _write_weights(source.config, recipe, tensors, smoothers, directory, stages)
        producer = {"quasar-trt": __version__} | {name: version(name) for name in ("torch", "transformers", "numpy")}
        described = {"path": source.path, "kind": source.kind, "notices": source.notices}
        manifest = Manifest(producer, "cpu", limits, 1, recipe, described, calibration, files)
        manifest.write(directory)
        model = ReferenceModel(source.config, Recipe("none"), tensors)
        windows = [ids[: limits.max_seq_len] for ids in unseen]
        measured = fidelity.measure(model, open_engine(directory), windows, progress)
        measured["text"] += f", written by the source model (seed {seed + _FIDELITY_SEED})"
        if choices:
            measured["groups"] = {name: choice.report() for name, choice in choices.items()}
        write_json(directory / "fidelity.json", measured)
    for notice in source.notices:
        stages.say(f"note: {notice}")
    if progress:
        stages.say(_summary(measured))
    return manifest


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


def _summary(measured: dict) -> str:
    return (
        f"fidelity to the source: KL {measured['kl']:.4f} +- {measured['kl_standard_error']:.4f}, "
        f"top-1 agreement {measured['top1_agreement']:.1%}, "
        f"perplexity {measured['source_perplexity']:.2f} -> {measured['engine_perplexity']:.2f} ({measured['tokens']} tokens)"
    )


def _check_output(output_dir: Path, force: bool) -> None:
    """Refuses an existing output before any work is done; `--force` replaces engine directories only."""
    if not output_dir.exists() and not output_dir.is_symlink():
        return
    if output_dir.is_symlink() or not output_dir.is_dir():
        raise QuasarError(f"output {output_dir} exists and is not a directory; choose another")
    if not force:
        raise QuasarError(f"output directory {output_dir} exists; choose another, or replace it with --force")
    if any(output_dir.iterdir()) and not (output_dir / "rank0.engine").is_file():
        raise QuasarError(
            f"{output_dir} is not an engine directory; --force replaces engine directories only: choose another"
        )


@contextmanager
def _appearing_whole(output_dir: Path, force: bool) -> Iterator[Path]:
    """A directory in a temporary one beside `output_dir`: it takes that name when the block succeeds, and vanishes with the
    temporary one when it fails."""
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.", dir=output_dir.parent))
    except OSError as error:
        raise QuasarError(f"cannot write in {output_dir.parent}: {error.strerror}; choose another output") from None
    replaced = temporary / "replaced"
    new = temporary / "new"
    try:
        new.mkdir()
        yield new
        _check_output(output_dir, force)  # it may have appeared meanwhile
        if output_dir.exists():
            _rename(output_dir, replaced)
        _rename(new, output_dir)
    finally:
        if replaced.exists() and new.exists():  # failed or interrupted between the two
            _rename(replaced, output_dir)  # if this fails too, `replaced` stays
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        raise QuasarError(f"cannot rename {source} to {target}: {error.strerror}") from None


def _dataset(source: Source, path: Path | None, tokenizer, size: int, length: int) -> list[list[int]]:
    """The given file's texts as ids, or none without a file; fewer than `size` is noted."""
    if path is None:
        return []
    if tokenizer is None:
        raise QuasarError(f"calib_dataset {path} needs a tokenizer, and {source.path} has none; leave it out")
    samples = dataset_ids(Path(path), tokenizer, size, length)
    if len(samples) < size:
        source.notices.append(f"calibration file {path} has {len(samples)} usable texts, {size} were requested")
    return samples


def _self_texts(
    source: Source,
    tensors: dict,
    tokenizer,
    size: int,
    length: int,
    longest: int,
    seed: int,
    scratch: Path,
    stages: Stages,
) -> tuple[list[list[int]], list[list[int]]]:
    """(calibration texts, fidelity texts), all written by the model in one batch; `scratch` holds its temporary file.

    `length` is that of calibration texts; `longest` is what the model allows.
    """
    vocab_size = source.config.vocab_size
    fidelity_length = min(_FIDELITY_LENGTH, longest)
    texts: list[SelfText] = new_texts(tokenizer, vocab_size, size, length, seed)
    texts += new_texts(tokenizer, vocab_size, _FIDELITY_SAMPLES, fidelity_length, seed + _FIDELITY_SEED)
    steps = max(text.length for text in texts)
    with source_engine(source.config, tensors, steps, scratch) as engine:
        write(engine, texts, stages.stage("Writing text", steps))
    ids = [text.ids for text in texts]
    return ids[:size], ids[size:]


def _observe(config: ModelConfig, tensors: dict, texts: list[list[int]], stages: Stages) -> ChannelMaxima:
    observer = ChannelMaxima()
    model = ReferenceModel(config, Recipe("none"), tensors, observe=observer)
    advance = stages.stage("Calibrating", len(texts))
    together = max(1, _CALIBRATION_ROWS // max(map(len, texts)))
    for start in range(0, len(texts), together):
        batch = texts[start : start + together]
        model.hidden_states([(ids, model.new_cache()) for ids in batch])
        advance(len(batch))
    return observer


def _write_weights(
    config: ModelConfig, recipe: Recipe, tensors: dict, smoothers: dict, directory: Path, stages: Stages
) -> dict:
    """The checkpoint and, compiled from it, the CPU's packed file; returns the manifest's records of both."""
    total = len(checkpoint_spec(config, recipe))
    stage = stages.stage("Quantizing" if recipe.quantized else "Writing", total)
    record = write_checkpoint(config, recipe, tensors, smoothers, directory / "checkpoint", stage)
    path = "checkpoint/rank0.safetensors"
    total = sum(spec.nbytes for spec in packed_spec(config, recipe).values())
    advance = stages.stage("Packing", total)
    packed = compile_cpu(config, recipe, load_tensors(directory / path), directory / "rank0.engine", advance)
    return {path: record, "rank0.engine": packed}
