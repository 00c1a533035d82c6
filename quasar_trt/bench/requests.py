"""Runs many requests at once through one runner: throughput by how many run together, and what a long prompt does to others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rich.console import Console

from quasar_trt.bench.options import RequestsBenchOptions
from quasar_trt.bench.progress import progress_bar
from quasar_trt.bench.prompts import EncodedPrompt, Prompt, encode_prompts
from quasar_trt.bench.requests_report import Batch, LongPrompt, RequestsReport
from quasar_trt.errors import QuasarError
from quasar_trt.manifest import Manifest
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams
from quasar_trt.tokenizer import load_tokenizer

LONG_PROMPT = 4096
_NUM_DECODING = 4
_UNDISTURBED_STEPS = 100


def run_requests_bench(
    engine_dir: Path, prompts: Sequence[Prompt], options: RequestsBenchOptions, progress_console: Console
) -> RequestsReport:
    """Decodes all `prompts` with every concurrency in turn, repeat by repeat; then measures the steps beside a long prompt.

    Raises QuasarError for a directory that cannot be opened, for fewer prompts than requests are to run at once, for more
    of them than the engine's max_batch_size and for a prompt that does not fit.
    """
    limits = Manifest.open(engine_dir).limits
    most = options.concurrency[-1]
    if most > limits.max_batch_size:
        raise QuasarError(
            f"concurrency is {most}; allowed: at most {limits.max_batch_size}, the engine's max_batch_size; build with a "
            "larger --max-batch-size"
        )
    if len(prompts) < most:
        raise QuasarError(f"there are {len(prompts)} prompts for a concurrency of {most}; give at least as many")
    encoded = encode_prompts(prompts, load_tokenizer(engine_dir), options.raw, limits.max_seq_len)
    runner = Runner.from_dir(
        engine_dir, drafter=options.drafter, drafter_options=options.drafter_options, threads=options.threads
    )
    with progress_bar(progress_console) as progress:
        rounds = [(repeat, number) for repeat in range(options.repeats) for number in options.concurrency]
        bar = progress.add_task("requests", total=len(rounds) + options.repeats)
        run_batch(runner, encoded[:most], most, options.sampling_params)  # warm-up
        batches = []
        for _, number in rounds:
            batches.append(run_batch(runner, encoded, number, options.sampling_params))
            progress.advance(bar)
        long_prompts = []
        for _ in range(options.repeats):
            long_prompts.append(run_long_prompt(runner, encoded, limits.max_seq_len))
            progress.advance(bar)
    return RequestsReport(options, engine_dir, len(encoded), tuple(batches), tuple(long_prompts))


def run_batch(
    runner: Runner, prompts: Sequence[EncodedPrompt], concurrency: int, sampling_params: SamplingParams
) -> Batch:
    """Decodes all prompts, at most so many at once: as one ends, the next begins. Prompts are computed too, and count."""
    runner.reset_prefix_cache()
    before = runner.stats.snapshot()
    waiting = [runner.prepare(prompt.ids, sampling_params, detokenize=False) for prompt in prompts]
    generations, running = list(waiting), []
    started = perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                running.append(waiting.pop(0))
                runner.submit(running[-1])
            runner.step()
            running = [generation for generation in running if not generation.finished]
        seconds = perf_counter() - started
    finally:
        for generation in generations:
            runner.abort(generation)
    ids = tuple(tuple(generation.output().outputs[0].token_ids) for generation in generations)
    return Batch(concurrency, ids, seconds, (runner.stats - before).mean_acceptance_length)


def run_long_prompt(runner: Runner, prompts: Sequence[EncodedPrompt], max_seq_len: int) -> LongPrompt:
    """Times the steps of requests that decode: undisturbed, and while a prompt of 4096 random ids enters beside them.

    The prompt is shorter where max_seq_len, which bounds the requests too, leaves it no room.
    """
    runner.reset_prefix_cache()
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    generations = [runner.prepare(prompt.ids, endless, detokenize=False) for prompt in prompts[:_NUM_DECODING]]
    vocab_size = runner.engine.config.vocab_size
    ids = random.Random(0).choices(range(vocab_size), k=min(LONG_PROMPT, max_seq_len - 1))
    entering = runner.prepare(ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), detokenize=False)

    def timed_step() -> float:
        started = perf_counter()
        runner.step()
        return perf_counter() - started

    try:
        for generation in generations:
            runner.submit(generation)
        while not all(generation.has_news for generation in generations):
            runner.step()
        undisturbed = [timed_step() for _ in range(_UNDISTURBED_STEPS)]
        runner.submit(entering)
        disturbed = []
        while not entering.finished:
            disturbed.append(timed_step())
    finally:
        for generation in (*generations, entering):
            runner.abort(generation)
    return LongPrompt(len(ids), len(generations), tuple(undisturbed), tuple(disturbed))
