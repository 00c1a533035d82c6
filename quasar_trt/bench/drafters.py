"""The benchmark of drafters: one engine, decoding plainly and with each of them, interleaved like the four cells."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from quasar_trt.bench.drafter_report import Contender, DrafterReport
from quasar_trt.bench.options import DrafterBenchOptions
from quasar_trt.bench.prompts import Prompt, encode_prompts, random_prompts
from quasar_trt.bench.run import run_cells
from quasar_trt.checkpoint import Checkpoint
from quasar_trt.drafters.registry import make_drafter
from quasar_trt.engines import engine_of
from quasar_trt.manifest import Manifest
from quasar_trt.tokenizer import load_tokenizer


def run_drafter_bench(
    engine_dir: Path, prompts: list[Prompt], options: DrafterBenchOptions, progress_console: Console
) -> DrafterReport:
    """`prompts` and `options.random_prompts` together are at least one. The progress bar goes to `progress_console`.

    Raises QuasarError for an unknown drafter, a directory that is no engine, a prompt that does not fit, and when a process
    fails.
    """
    for name in options.drafters:
        make_drafter(name)
    manifest = Manifest.open(engine_dir)
    vocab_size = Checkpoint.open(engine_dir / "checkpoint").config.vocab_size
    max_seq_len = manifest.limits.max_seq_len
    encoded = encode_prompts(prompts, load_tokenizer(engine_dir), options.raw, max_seq_len)
    encoded += random_prompts(options.random_prompts, options.seed, vocab_size, max_seq_len)
    engine = engine_of(manifest)  # chosen here, so that a warning about it appears once and not once per process
    contenders = [Contender(drafter) for drafter in (None, *options.drafters)]
    openings = {
        contender: (engine_dir, {"drafter": contender.drafter, "engine": engine, "threads": options.threads})
        for contender in contenders
    }
    runs, _, _, peak_memory = run_cells(openings, encoded, options, progress_console)
    return DrafterReport(options, engine_dir, tuple(contenders), runs, peak_memory)
