"""Many clients of one server for some minutes: python scripts/server_soak.py ENGINE_DIR [--clients N] [--seconds S]

Requests of both kinds with mixed parameters, whole and streamed, through the openai client; a tenth of the streams is left
in the middle, and one request in ten is none: malformed, too large, not UTF-8, a flood of headers, or too slow. Ends with exit
code 1 when an answer is not the runner's own, the server fails or does not end in order, keys and values are left over, or the
server's memory grew in the second half.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

import openai
from served import WORDS, Server

from quasar_trt import Runner
from quasar_trt.server.protocol import ChatRequest, CompletionRequest

NUM_QUESTIONS = 48
MAX_BODY_BYTES = 100_000
ALLOWED_GROWTH = 32 << 20  # bytes; pools of the allocator still fill up


def question(draw: random.Random) -> tuple[bool, dict]:
    """Whether it is a chat, and what is asked."""
    text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))
    temperature = draw.choice([0.0, 0.7, 1.0])
    body = {
        "temperature": temperature,
        "seed": draw.randrange(1000),
        "max_tokens": draw.randrange(1, 64),
        "n": draw.choice([1, 1, 1, 2]) if temperature else 1,
        "top_p": draw.choice([1.0, 0.9]),
        "presence_penalty": draw.choice([0.0, 0.5]),
        "ignore_eos": draw.random() < 0.5,
    }
    body |= draw.choice([{}, {"top_k": 20}, {"min_p": 0.05}, {"stop": ["e t", "a s"]}, {"min_tokens": 1}])
    if draw.random() < 0.5:
        messages = [{"role": "user", "content": text}]
        return True, body | {"messages": messages} | draw.choice([{}, {"logprobs": True, "top_logprobs": 3}])
    return False, body | {"prompt": text} | draw.choice([{}, {"logprobs": 2}])


def expected(runner: Runner, chat: bool, body: dict) -> list[tuple[list[int], str, str]]:
    """(ids, text, finish reason) of each completion."""
    params = (ChatRequest if chat else CompletionRequest)(**body).sampling_params()
    prompt = runner.chat_ids(body["messages"]) if chat else body["prompt"]
    outputs = runner.generate([prompt], params)[0].outputs
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Clients:
    """Asks until `seconds` are over; `counts` tells what came of it."""

    def __init__(self, server: Server, questions: list, seconds: float):
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._address = server.address
        self._openai = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        self._questions = questions
        self._until = time.monotonic() + seconds

    async def run(self, count: int) -> None:
        async with self._openai:
            await asyncio.gather(*(self._client(random.Random(number)) for number in range(count)))

    async def _client(self, draw: random.Random) -> None:
        while time.monotonic() < self._until:
            try:
                if draw.random() < 0.1:
                    await self._nuisance(draw)
                else:
                    await self._ask(draw, *draw.choice(self._questions))
            except openai.RateLimitError as error:
                assert error.response.headers["retry-after"] == "1"
                self.counts["told to come again"] += 1
                await asyncio.sleep(draw.random())

    async def _ask(self, draw: random.Random, chat: bool, body: dict, wanted: list) -> None:
        streams = draw.random() < 0.7
        endpoint = self._openai.chat.completions if chat else self._openai.completions
        own = {"ignore_eos", "top_k", "min_p", "min_tokens"}
        extra = {name: value for name, value in body.items() if name in own}
        given = {name: value for name, value in body.items() if name not in own}
        answer = await endpoint.create(
            model=self.model, **given, stream=streams, extra_body=extra | {"return_token_ids": True}
        )
        if streams and draw.random() < 0.1 / 0.7:
            for _ in range(draw.randrange(3)):
                await anext(aiter(answer), None)
            await answer.close()
            self.counts["left in the middle"] += 1
            return
        found = [[[], "", None] for _ in wanted]
        for choice in [choice async for chunk in answer for choice in chunk.choices] if streams else answer.choices:
            parts = found[choice.index]
            text = (choice.delta if streams else choice.message).content if chat else choice.text
            parts[0], parts[1], parts[2] = parts[0] + choice.token_ids, parts[1] + (text or ""), choice.finish_reason
        if [tuple(parts) for parts in found] != wanted:
            self.wrong.append(f"{json.dumps(body)}: {found} instead of {wanted}")
        self.counts["answered"] += 1

    async def _nuisance(self, draw: random.Random) -> None:
        """What is no request must be refused, or cut off; the answers to others show that nothing else comes of it."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        bodies = {
            "malformed": b'{"prompt": ',
            "too large": b" " * (2 * MAX_BODY_BYTES),
            "not UTF-8": b'{"prompt": "\xff\xfe"}',
            "wrong": b'{"prompt": "a", "temperature": -1}',
        }
        kind = draw.choice([*bodies, "flood", "slow"])
        reader, writer = await asyncio.open_connection(*self._address)
        with contextlib.suppress(ConnectionError):
            if kind == "flood":
                writer.write(head + b"".join(b"X-%d: y\r\n" % number for number in range(20_000)))
            elif kind == "slow":
                writer.write(head)
                await asyncio.sleep(draw.random())
            else:
                body = bodies[kind]
                writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            if kind != "slow":
                answer = await reader.read(65536)
                if answer and not answer.startswith(b"HTTP/1.1 4"):
                    self.wrong.append(f"{kind}: {answer!r}")
        writer.close()
        self.counts[kind] += 1

    model = ""


def main(engine_dir: str, num_clients: int, seconds: float) -> None:
    draw = random.Random(0)
    runner = Runner.from_dir(engine_dir)
    questions = [question(draw) for _ in range(NUM_QUESTIONS)]
    questions = [(chat, body, expected(runner, chat, body)) for chat, body in questions]
    del runner
    limits = {"--max-requests": max(num_clients * 3 // 4, 2), "--max-body-bytes": MAX_BODY_BYTES}
    server = Server(engine_dir, *[str(part) for option in limits.items() for part in option])
    clients = Clients(server, questions, seconds)
    clients.model = Path(engine_dir).resolve().name
    sizes: list[int] = []

    async def watched() -> None:
        work = asyncio.create_task(clients.run(num_clients))
        while not work.done():
            await asyncio.wait([work], timeout=seconds / 20)
            sizes.append(resident_bytes(server.process.pid))
            print(f"{sizes[-1] / 2**20:.0f} MiB resident, {dict(clients.counts)}", flush=True)
        await work

    try:
        asyncio.run(watched())
    finally:
        failure = server.end()
    growth = sizes[-1] - max(sizes[: len(sizes) // 2 + 1])
    problems = [*clients.wrong[:5], *([failure] if failure else [])]
    if growth > ALLOWED_GROWTH:
        problems.append(f"memory grew by {growth} bytes in the second half")
    print(f"{num_clients} clients, {dict(clients.counts)}, {len(clients.wrong)} wrong, growth {growth} bytes")
    sys.exit("\n".join(problems) or None)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("engine_dir")
parser.add_argument("--clients", type=int, default=64)
parser.add_argument("--seconds", type=float, default=180.0)
arguments = parser.parse_args()
main(arguments.engine_dir, arguments.clients, arguments.seconds)
