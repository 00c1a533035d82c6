"""What serving costs: python scripts/server_bench.py ENGINE_DIR [--clients N] [--max-tokens N] [--repeats N] [--threads N]

- Throughput: as many streaming clients as prompts against `Runner.generate` with the same prompts, with the default drafter.
- Processor time that serving takes per streamed token, as a share of a step's wall time: one client, plain. It is that of the
  event loop's thread, and that of the whole process beyond what the runner alone takes for the same text, which is a
  difference of two large numbers: it tells only on a quiet machine.

Clients are raw sockets in this process. Both sides have the same number of engine threads and take turns; each figure is
the median over the repeats, (min..max) beside it. The prompts of each repeat are new, so no prefix is reused.
"""

import argparse
import json
import os
import random
import re
import selectors
import socket
import statistics
import sys
import time
from pathlib import Path

from served import WORDS, Server

from quasar_trt import Runner, SamplingParams


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of the whole process, and of its first thread, which is the event loop's."""
    return _cpu_seconds(f"/proc/{pid}/stat"), _cpu_seconds(f"/proc/{pid}/task/{pid}/stat")


def _cpu_seconds(path: str) -> float:
    fields = Path(path).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stream(address: tuple[str, int], bodies: list[dict]) -> tuple[float, int]:
    """Seconds until all answers have ended, and the tokens that they have."""
    requests = []
    for body in bodies:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body | options).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    clients = [socket.create_connection(address) for _ in requests]
    parts: dict[socket.socket, list[bytes]] = {client: [] for client in clients}
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for client, request in zip(clients, requests, strict=True):
            client.sendall(request)
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if data := key.fileobj.recv(1 << 20):
                    parts[key.fileobj].append(data)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    seconds = time.perf_counter() - began
    return seconds, sum(int(re.search(rb'"completion_tokens":(\d+)', b"".join(each))[1]) for each in parts.values())


def share(name: str, values: list[float]) -> None:
    print(f"{name}: {statistics.median(values):.1%} ({min(values):.1%}..{max(values):.1%})")


def main(engine_dir: str, num_clients: int, max_tokens: int, repeats: int, threads: int) -> None:
    draw = random.Random(0)
    options = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    params = SamplingParams(**options)
    runner = Runner.from_dir(engine_dir, threads=threads)
    plain = Runner.from_dir(engine_dir, drafter=None, threads=threads)
    server = Server(engine_dir, "--threads", str(threads))

    def prompts(count: int) -> list[str]:
        return [" ".join(draw.choices(WORDS, k=40)) for _ in range(count)]

    throughputs, loops, costs = [], [], []
    try:
        for number in range(repeats + 1):
            texts = prompts(num_clients)
            began = time.perf_counter()
            alone = sum(len(each.outputs[0].token_ids) for each in runner.generate(texts, params))
            alone /= time.perf_counter() - began
            seconds, tokens = stream(server.address, [options | {"prompt": text} for text in texts])

            (text,) = prompts(1)
            cpu, wall = time.process_time(), time.perf_counter()
            num_steps = sum(len(piece.token_ids) for piece in plain.stream(text, params))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            before = cpu_seconds(server.process.pid)
            _, num_tokens = stream(server.address, [options | {"prompt": text, "drafter": "none"}])
            whole, loop = (
                (later - earlier) / num_tokens
                for earlier, later in zip(before, cpu_seconds(server.process.pid), strict=True)
            )
            step, beyond = wall / num_steps, whole - cpu / num_steps
            print(
                f"{f'repeat {number}' if number else 'warm-up'}: {num_clients} clients {tokens / seconds:.1f} tokens/s, "
                f"runner alone {alone:.1f}; one client: step {1e3 * step:.2f} ms, processor time per token: event loop "
                f"{1e3 * loop:.3f} ms, beyond the runner {1e3 * beyond:.3f} ms",
                flush=True,
            )
            if number:
                throughputs.append(tokens / seconds / alone)
                loops.append(loop / step)
                costs.append(beyond / step)
    finally:
        failure = server.end()
    if failure:
        sys.exit(failure)
    share(f"throughput of {num_clients} clients / Runner.generate", throughputs)
    share("processor time of the event loop per token / a step", loops)
    share("processor time beyond the runner's per token / a step", costs)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("engine_dir")
parser.add_argument("--clients", type=int, default=16)
parser.add_argument("--max-tokens", type=int, default=256)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--threads", type=int, default=1)
arguments = parser.parse_args()
main(arguments.engine_dir, arguments.clients, arguments.max_tokens, arguments.repeats, arguments.threads)
