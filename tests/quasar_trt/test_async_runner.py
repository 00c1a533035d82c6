"""`AsyncRunner`: many coroutines, one engine thread; nobody waits in vain and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from stubs import ByteTokenizer, GatedEngine, StubDrafter, perfect_rule, random_logits

from quasar_trt.async_runner import AsyncRunner
from quasar_trt.errors import QuasarError, RunnerBusy
from quasar_trt.prefix_cache import PrefixCache
from quasar_trt.runner import Runner
from quasar_trt.sampling_params import SamplingParams

VOCAB = 257
LOGITS = random_logits(VOCAB, seed=3, spread=4.0)
ENDLESS = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    """So that empty caches mean that every request has given back what it held."""
    monkeypatch.setattr(PrefixCache, "min_length", 1000)


def open_runner(**options) -> tuple[Runner, GatedEngine]:
    engine = GatedEngine(LOGITS, VOCAB)
    drafter = StubDrafter(perfect_rule(LOGITS), 3)
    return Runner(engine, drafter=drafter, tokenizer=ByteTokenizer(), **options), engine


def params(seed: int = 0, max_tokens: int = 12, **options) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=max_tokens, ignore_eos=True, **options)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(stream) -> list:
    return [piece async for piece in stream]


def test_answers_are_those_of_the_runner_alone():
    alone, _ = open_runner()
    expected = [alone.generate([f"prompt {n}"], params(n, n=1 + n % 2))[0] for n in range(20)]

    async def main():
        runner, engine = open_runner(max_batch_size=4)
        async with AsyncRunner(runner) as server:
            answers = asyncio.gather(*(server.generate(f"prompt {n}", params(n, n=1 + n % 2)) for n in range(10)))
            streams = asyncio.gather(
                *(collect(server.stream(f"prompt {n}", params(n, n=1 + n % 2))) for n in range(10, 20))
            )
            return await answers, await streams, engine

    answers, streams, engine = run(main())
    for answer, wanted in zip(answers, expected, strict=False):
        assert answer.outputs == wanted.outputs
        assert [each.text for each in answer.outputs] == [each.text for each in wanted.outputs]
    for pieces, wanted in zip(streams, expected[10:], strict=True):
        for index, completion in enumerate(wanted.outputs):
            own = [piece for piece in pieces if piece.index == index]
            assert [token for piece in own for token in piece.token_ids] == completion.token_ids
            assert "".join(piece.text for piece in own) == completion.text
            assert [piece.finish_reason for piece in own[-2:]] in ([None, "length"], ["length"])
    assert not engine.caches


def test_many_run_together():
    async def main():
        runner, engine = open_runner()
        engine.gate.clear()
        async with AsyncRunner(runner) as server:
            tasks = [asyncio.create_task(server.generate([n + 1], params(n))) for n in range(5)]
            await asyncio.sleep(0.05)
            engine.gate.set()
            await asyncio.gather(*tasks)
        return engine

    assert max(len(step.sequences) for step in run(main()).passes) >= 4  # the first pass may have begun with one alone


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_cancelled_task_aborts_its_request_and_no_other(streamed, waiting):
    async def main():
        runner, engine = open_runner(max_batch_size=1 if waiting else 4)
        async with AsyncRunner(runner) as server:
            other = asyncio.create_task(server.generate([1, 2], params(1, 100)))
            call = collect(server.stream([3], ENDLESS)) if streamed else server.generate([3], ENDLESS)
            task = asyncio.create_task(call)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answer = await other
            _, service, _ = await server.metrics()
        return answer, service, engine

    answer, service, engine = run(main())
    assert answer.outputs == open_runner()[0].generate([[1, 2]], params(1, 100))[0].outputs
    assert not engine.caches and service.num_finished == 2


def test_stream_that_is_closed_early_aborts_its_request():
    async def main():
        runner, engine = open_runner()
        async with AsyncRunner(runner) as server, contextlib.aclosing(server.stream([3], ENDLESS)) as stream:
            async for _ in stream:
                break
        return engine

    assert not run(main()).caches


def test_abort_gives_what_there_is():
    async def main():
        runner, engine = open_runner()
        async with AsyncRunner(runner) as server:
            pieces, answer = [], asyncio.create_task(server.generate([4], ENDLESS, request_id="answer"))
            async for piece in server.stream([3], ENDLESS, request_id="stream"):
                pieces.append(piece)
                await server.abort("stream")
            await server.abort("answer")
            await server.abort("nobody")
            return pieces, await answer, engine

    pieces, answer, engine = run(main())
    chain = perfect_rule(LOGITS)
    found = [token for piece in pieces for token in piece.token_ids]
    assert pieces[-1].finish_reason in ("abort", "length") and found == chain([3], len(found))
    (completion,) = answer.outputs
    assert completion.finish_reason in ("abort", "length")
    assert completion.token_ids == chain([4], len(completion.token_ids))
    assert not engine.caches


def test_timeout_ends_a_request():
    async def main():
        runner, engine = open_runner()
        async with AsyncRunner(runner) as server:
            return await server.generate([3], ENDLESS, timeout=0), engine

    answer, engine = run(main())
    assert answer.outputs[0].finish_reason == "timeout" and not engine.caches


def test_fault_of_the_engine_reaches_every_waiter_and_later_requests_run():
    async def main():
        runner, engine = open_runner(max_batch_size=2)
        async with AsyncRunner(runner) as server:
            engine.gate.clear()
            calls = [server.generate([n + 1], params(n)) for n in range(3)] + [collect(server.stream([9], params()))]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0.05)
            engine.fault = RuntimeError("the pass failed")
            engine.gate.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert not engine.caches
            return results, await server.generate([1, 2], params(1))

    results, answer = run(main())
    assert [str(result) for result in results] == ["the pass failed"] * 4
    assert answer.outputs == open_runner()[0].generate([[1, 2]], params(1))[0].outputs


def test_fault_that_ends_the_thread_reaches_every_waiter():
    async def main():
        runner, engine = open_runner()
        server = AsyncRunner(runner)
        engine.gate.clear()
        tasks = [asyncio.create_task(server.generate([n + 1], params(n))) for n in range(3)]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(server.metrics()))
        await asyncio.sleep(0)
        engine.fault = SystemExit("killed")
        engine.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(QuasarError, match=r"the engine thread has ended: SystemExit\('killed'\); make another"):
            await server.generate([1])
        await server.shutdown()
        return results

    assert ["SystemExit('killed')" in str(result) for result in run(main())] == [True] * 4


def test_bad_prompt_is_refused_and_others_go_on():
    def failing(emitted, row):
        raise ValueError("a processor failed")

    async def main():
        runner, _ = open_runner()
        async with AsyncRunner(runner) as server:
            calls = [
                server.generate([999], params()),
                server.generate([1], params(logits_processors=[failing])),
                collect(server.stream([1], params(logits_processors=[failing]))),
                server.generate([1], params(), timeout="soon"),
                server.generate([1, 2], params(1)),
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

    unknown, failed, failed_stream, untimely, answer = run(main())
    assert isinstance(unknown, QuasarError) and "token id 999" in str(unknown)
    assert failed.outputs[0].finish_reason == "error" and "a processor failed" in failed.outputs[0].stop_reason
    assert isinstance(failed_stream, QuasarError) and "a processor failed" in str(failed_stream)
    assert isinstance(untimely, QuasarError)
    assert answer.outputs == open_runner()[0].generate([[1, 2]], params(1))[0].outputs


def test_requests_beyond_the_limit_are_refused_until_one_ends():
    async def main():
        runner, engine = open_runner()
        async with AsyncRunner(runner, max_requests=2) as server:
            engine.gate.clear()
            tasks = [asyncio.create_task(server.generate([n + 1], params(n))) for n in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(RunnerBusy, match="2 requests are open; allowed: 2; ask again later"):
                await server.generate([5], params())
            engine.gate.set()
            await asyncio.gather(*tasks)
            await server.generate([5], params())

    run(main())


def test_each_completion_counts_for_the_limit():
    async def main():
        runner, engine = open_runner()
        async with AsyncRunner(runner, max_requests=3) as server:
            engine.gate.clear()
            task = asyncio.create_task(server.generate([1], params(n=2)))
            await asyncio.sleep(0)
            with pytest.raises(RunnerBusy, match="2 requests are open; allowed: 3"):
                await server.generate([5], params(n=2))
            with pytest.raises(QuasarError, match="n is 4; allowed: at most 3") as refused:
                await server.generate([5], params(n=4))
            assert not isinstance(refused.value, RunnerBusy)
            engine.gate.set()
            await task
            await server.generate([5], params(n=3))

    run(main())


@pytest.mark.parametrize("drafts", [True, False])
def test_requests_are_drafted_or_plain_one_by_one(drafts):
    async def main():
        runner, _ = open_runner()
        async with AsyncRunner(runner) as server:
            return await asyncio.gather(
                server.generate([1, 2], ENDLESS, drafts=not drafts),
                collect(server.stream([3], ENDLESS, drafts=drafts)),
            )

    answer, pieces = run(main())
    assert bool(answer.metrics.num_drafts) is not drafts and bool(pieces[-1].metrics.num_drafts) is drafts
    assert [piece.metrics for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    origins = [origin for piece in pieces for origin in piece.origins]
    assert {*origins} == ({"accepted", "bonus"} if drafts else {"plain"})
    assert len(origins) == pieces[-1].metrics.num_emitted_tokens == 250


def test_request_ids_are_unique_while_they_are_in_use():
    async def main():
        runner, engine = open_runner()
        async with AsyncRunner(runner) as server:
            engine.gate.clear()
            task = asyncio.create_task(server.generate([1], params(), request_id="a"))
            await asyncio.sleep(0)
            with pytest.raises(QuasarError, match="request_id is 'a', which has not ended"):
                await server.generate([1], params(), request_id="a")
            engine.gate.set()
            await task
            await server.generate([1], params(), request_id="a")

    run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_answers_everyone(drain):
    async def main():
        runner, engine = open_runner(max_batch_size=2)
        server = AsyncRunner(runner)
        engine.gate.clear()
        tasks = [asyncio.create_task(server.generate([n + 1], params(n, 40))) for n in range(5)]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(server.shutdown(drain=drain))
        await asyncio.sleep(0)
        with pytest.raises(QuasarError, match="the runner is shut down; make another"):
            await server.generate([1], params())
        engine.gate.set()
        await closing
        await server.shutdown()
        assert not server._thread.is_alive()
        return await asyncio.gather(*tasks), engine, runner

    answers, engine, runner = run(main())
    reasons = {answer.outputs[0].finish_reason for answer in answers}
    assert reasons == ({"length"} if drain else {"abort"})
    assert not engine.caches
    assert runner.generate([[1]], params())  # which is free again


def test_exception_in_the_block_aborts_what_runs():
    async def main():
        runner, _ = open_runner()
        with pytest.raises(ZeroDivisionError):
            async with AsyncRunner(runner) as server:
                task = asyncio.create_task(server.generate([1], ENDLESS))
                await asyncio.sleep(0)
                raise ZeroDivisionError
        return await task

    assert run(main()).outputs[0].finish_reason in ("abort", "length")


def test_slow_reader_holds_up_nobody():
    async def main():
        runner, _ = open_runner()
        async with AsyncRunner(runner) as server:
            stream = server.stream([3], params(2, 30))
            first = await anext(stream)
            await server.generate([1], params(1, 100))
            _, _, load = await server.metrics()
            return [first, *await collect(stream)], load

    pieces, load = run(main())
    assert load.num_running == 0
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == open_runner()[0].generate([[3]], params(2, 30))[0].outputs[0].token_ids


def test_metrics_and_chat_ids_come_from_the_engine_thread():
    async def main():
        runner, _ = open_runner()
        async with AsyncRunner(runner) as server:
            await server.generate([1], params(1))
            with pytest.raises(QuasarError, match="messages is"):
                await server.chat_ids([])
            return await server.metrics()

    stats, service, load = run(main())
    assert stats.num_emitted_tokens == 12
    assert (service.num_finished, service.time_to_first_token.count) == (1, 1)
    assert (load.num_waiting, load.num_running) == (0, 0)
