"""Random requests, many at once: python scripts/soak.py ENGINE_DIR [--minutes M | --requests N]

Prompts, lengths and parameters are random, a tenth of the requests is aborted, and there is memory for about six of them.
Ends with exit code 1 when a request is lost, keys and values are left over, or the process's memory grew in the second half.
"""

import argparse
import math
import random
import sys
import time
from pathlib import Path

from quasar_trt import Runner, SamplingParams

LONGEST_PROMPT, MOST_TOKENS = 400, 112
ALLOWED_GROWTH = 32 << 20  # bytes; pools of the allocator still fill up


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def random_request(draw: random.Random, vocab_size: int) -> tuple[list[int], SamplingParams]:
    begin = random.Random(draw.randrange(4)).choices(range(vocab_size), k=draw.choice([0, LONGEST_PROMPT // 2]))
    prompt = begin + draw.choices(range(vocab_size), k=draw.randrange(1, LONGEST_PROMPT // 2))
    temperature = draw.choice([0.0, 0.7, 1.0])
    params = SamplingParams(
        n=draw.choice([1, 1, 2]) if temperature else 1,
        temperature=temperature,
        seed=draw.randrange(1000),
        max_tokens=draw.randrange(1, MOST_TOKENS),
        top_p=draw.choice([1.0, 0.9]),
        presence_penalty=draw.choice([0.0, 0.5]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
    )
    return prompt, params


def main(engine_dir: str, minutes: float, most_requests: float) -> None:
    draw = random.Random(0)
    memory = 6 * Runner.from_dir(engine_dir).engine.bytes_of(LONGEST_PROMPT + MOST_TOKENS)
    runner = Runner.from_dir(engine_dir, kv_cache_memory_bytes=memory)
    started, told, num_requests = time.monotonic(), 0.0, 0
    generations = []
    at_half = None

    def done() -> float:
        """The share of the work that was begun."""
        return max((time.monotonic() - started) / (60 * minutes), num_requests / most_requests)

    while generations or done() < 1:
        while len(generations) < 32 and done() < 1:
            generations.append(runner.prepare(*random_request(draw, runner.engine.config.vocab_size)))
            runner.submit(generations[-1])
            num_requests += len(generations[-1].requests)
            if draw.random() < 0.1:
                runner.abort(draw.choice(generations))
        if at_half is None and done() > 0.5:
            at_half = resident_bytes()
        runner.step()
        generations = [each for each in generations if not each.finished]
        load = runner.load
        if load.kv_bytes > load.kv_limit:
            sys.exit(f"keys and values take {load.kv_bytes} bytes, more than {load.kv_limit}")
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(
                f"{told - started:.0f} s, {num_requests} requests, {runner.service.num_preemptions} preemptions, "
                f"{runner.service.num_reused_tokens} tokens reused, {resident_bytes() / 2**20:.0f} MiB resident",
                flush=True,
            )
    runner.reset_prefix_cache()
    num_lost = num_requests - runner.service.num_finished
    left = runner.load.kv_bytes
    growth = resident_bytes() - at_half
    print(
        f"{num_requests} requests, {num_lost} lost, {left} bytes of keys and values left over, "
        f"{growth / 2**20:.0f} MiB more resident than half-way"
    )
    sys.exit(1 if num_lost or left or growth > ALLOWED_GROWTH else 0)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("engine_dir")
length = parser.add_mutually_exclusive_group()
length.add_argument("--minutes", type=float, help="20 by default")
length.add_argument("--requests", type=int)
args = parser.parse_args()
minutes = args.minutes or (20.0 if args.requests is None else math.inf)
main(args.engine_dir, minutes, args.requests or math.inf)
