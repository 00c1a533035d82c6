"""Answer several messages at once from coroutines: python examples/many.py ENGINE_DIR MESSAGE..."""

import asyncio
import sys

from quasar_trt import AsyncRunner, Runner, SamplingParams


async def answer(runner: AsyncRunner, message: str) -> str:
    prompt = await runner.chat_ids([{"role": "user", "content": message}])
    pieces = [piece.text async for piece in runner.stream(prompt, SamplingParams(temperature=0, max_tokens=64))]
    return "".join(pieces)


async def main(engine_dir: str, messages: list[str]) -> None:
    async with AsyncRunner(Runner.from_dir(engine_dir)) as runner:
        texts = await asyncio.gather(*(answer(runner, message) for message in messages))
        _, service, _ = await runner.metrics()
    for message, text in zip(messages, texts, strict=True):
        print(f"{message!r}: {text!r}")
    first, later = service.time_to_first_token, service.inter_token
    print(f"{first.count} requests, first token after {first.mean:.3f} s, then one each {later.mean:.4f} s")


if len(sys.argv) < 3:
    sys.exit(__doc__)
asyncio.run(main(sys.argv[1], sys.argv[2:]))
