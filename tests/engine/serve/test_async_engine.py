"""The engine on asyncio: many consumers at once, those that leave, closing, progress over many prompts."""

import asyncio
import threading

import pytest

from minillm.data import Tokenizer
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, AsyncLLM, SamplingParams
from minillm.serve.requests.output import output_of

CONFIG = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=48, init_std=0.2)
MODEL = Transformer(CONFIG, seed=3)
PATIENCE_S = 600  # only what never ends takes as long
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 14]]


def naive(prompt, count):
    return list(generate(MODEL, prompt, count))


def nothing_left(llm):
    assert llm.step() == [] and llm.unfinished == 0 and not llm.requests.live
    assert llm.pool.used == 0 and llm.pool.references == [0] * llm.pool.total
    assert "minillm engine" not in [thread.name for thread in threading.enumerate()]


def run(use, **options):
    """use(server) to its end, on an engine that has to be empty afterwards."""
    llm = LLM(MODEL, block_size=4, num_blocks=40, max_num_seqs=8, **options)

    async def main():
        async with AsyncLLM(llm) as server:
            return await asyncio.wait_for(use(server), PATIENCE_S)

    found = asyncio.run(main())
    nothing_left(llm)
    return found


async def tokens_of(stream):
    return [token.id async for delta in stream for token in delta.tokens]


def test_many_requests_at_once_get_their_own_tokens():
    async def use(server):
        wanted = [(PROMPTS[i % 4], 2 + i % 9) for i in range(40)]
        streams = [tokens_of(server.stream(p, SamplingParams(max_tokens=n))) for p, n in wanted]
        assert await asyncio.gather(*streams) == [naive(p, n) for p, n in wanted]
        assert max(record.running for record in server.llm.records) == 8

    run(use)


def test_the_event_loop_goes_on_and_deltas_come_one_by_one():
    async def use(server):
        turns, done = 0, asyncio.Event()

        async def others():
            nonlocal turns
            while not done.is_set():
                turns += 1
                await asyncio.sleep(0)

        other, sizes = asyncio.create_task(others()), []
        stream = server.stream(PROMPTS[0], SamplingParams(max_tokens=9))
        async for delta in stream:
            sizes.append(len(delta.tokens))
        done.set()
        await other
        assert sizes == [1] * 9 and turns > 0
        assert stream.output.answers[0].reason == "length"
        assert [item async for item in stream] == []  # it has ended

    run(use)


@pytest.mark.parametrize("how", ["break", "cancel", "close", "never started"])
def test_a_consumer_that_leaves_cancels_its_request(how):
    async def use(server):
        params, stays = SamplingParams(max_tokens=40), asyncio.create_task(server.generate(PROMPTS[1]))

        async def leaves():
            stream = server.stream(PROMPTS[0], params)
            requests.append(stream.request)
            if how == "never started":
                return
            async for _ in stream:
                if how == "break":
                    return
                if how == "close":
                    await stream.aclose()
                if how == "cancel":
                    asyncio.current_task().cancel()

        requests = []
        await asyncio.gather(leaves(), return_exceptions=True)
        assert (await stays).answers[0].ids == naive(PROMPTS[1], 16)
        while requests[0].ended is None:
            await asyncio.sleep(0.01)
        assert [answer.reason for answer in output_of(requests[0]).answers] == ["cancelled"]

    run(use)


def test_closing_ends_every_stream_and_refuses_more():
    async def use(server):
        step, closed = server.llm.advance, threading.Event()
        server.llm.advance = lambda: (len(server.llm.records) < 3 or closed.wait(PATIENCE_S)) and step()
        stream = server.stream(PROMPTS[0], SamplingParams(max_tokens=40))
        await anext(stream)
        closing = asyncio.create_task(server.aclose())
        await asyncio.sleep(0)  # it has begun, and waits for the engine's thread
        closed.set()
        await closing
        await server.aclose()
        assert stream.output.timing.ended is not None and len(await tokens_of(stream)) < 40
        with pytest.raises(RuntimeError, match="takes no requests any more: it is closed"):
            server.stream(PROMPTS[0])

    run(use)


def test_errors_come_where_they_belong():
    async def use(server):
        with pytest.raises(ValueError, match="a prompt of 0 tokens does not fit"):
            server.stream([])
        right, calls = server.llm.core.next_tokens.advance, []

        def broken(*arguments):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("the device is gone")
            return right(*arguments)

        server.llm.core.next_tokens.advance = broken
        with pytest.raises(RuntimeError, match="request 'mine' failed: sampling raised RuntimeError: the device is"):
            await server.generate(PROMPTS[0], request_id="mine")
        assert (await server.generate(PROMPTS[0])).answers[0].ids == naive(PROMPTS[0], 16)

    run(use)


def test_a_step_that_cannot_go_on_tells_everybody():
    async def use(server):
        streams = [server.stream(prompt, SamplingParams(max_tokens=30)) for prompt in PROMPTS[:2]]
        await anext(streams[0])
        right, server.llm.scheduler.schedule = server.llm.scheduler.schedule, lambda: 1 / 0
        for stream in streams:
            with pytest.raises(RuntimeError, match="stopped: ZeroDivisionError"):
                await tokens_of(stream)
        server.llm.scheduler.schedule = right
        with pytest.raises(RuntimeError, match="takes no requests any more: it stopped: ZeroDivisionError"):
            server.stream(PROMPTS[0])

    run(use)


def test_text_is_streamed_too():
    tokenizer = Tokenizer.load()
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, max_seq_len=64, init_std=0.2)
    llm = LLM(Transformer(config, seed=1), tokenizer=tokenizer)
    [right] = llm.generate(["def hello"], SamplingParams(max_tokens=8))

    async def main():
        async with AsyncLLM(llm) as server:
            return "".join([delta.text async for delta in server.stream("def hello", SamplingParams(max_tokens=8))])

    assert asyncio.run(main()) == right.answers[0].text


def test_progress_over_many_prompts(capsys):
    llm = LLM(MODEL)
    for progress, shown in ((True, True), (None, False), (False, False)):  # standard error is no terminal here
        outputs = llm.generate([[1]] * 20, SamplingParams(max_tokens=2), progress=progress)
        assert len(outputs) == 20 and ("20/20" in capsys.readouterr().err) == shown


def test_a_step_calls_the_event_loop_once_however_many_listen(monkeypatch):
    async def use(server):
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe

        def counted(function, *arguments):
            calls.append(threading.current_thread().name)
            return call(function, *arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams = [tokens_of(server.stream(prompt, SamplingParams(max_tokens=9))) for prompt in PROMPTS * 2]
        found = await asyncio.gather(*streams)
        assert found == [naive(prompt, 9) for prompt in PROMPTS * 2]
        assert calls.count("minillm engine") <= len(server.llm.records) < sum(map(len, found))

    run(use)


def test_a_prompt_becomes_tokens_in_a_thread(monkeypatch):
    tokenizer, names = Tokenizer.load(), []
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 1, 2, max_seq_len=64, tie_embeddings=True)
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer,
        "encode",
        lambda text: names.append(threading.current_thread() is threading.main_thread()) or encode(text),
    )

    async def main():
        async with AsyncLLM(LLM(Transformer(config, seed=3), tokenizer=tokenizer)) as server:
            await server.generate("def f(x):", SamplingParams(max_tokens=2))
            assert [delta async for delta in await server.open("def ", SamplingParams(max_tokens=2))]
            with pytest.raises(ValueError, match="a prompt of 64 tokens does not fit"):
                await server.open([1] * 64)

    asyncio.run(main())
    assert names == [False, False]


@pytest.mark.parametrize("why", ["closed", "stopped"])
def test_a_request_that_comes_as_the_thread_ends_is_refused(monkeypatch, why):
    """Between the first look at the door and the way in, the thread ends: nobody would ever answer."""

    async def main():
        llm = LLM(MODEL, block_size=4)
        server, make = AsyncLLM(llm), llm.requests.request

        def ends(*given, **options):
            monkeypatch.setattr(llm.requests, "request", make)
            if why == "closed":
                closing = threading.Thread(target=lambda: asyncio.run(server.aclose()))
                closing.start()
                closing.join()
            else:
                others.append(server.stream([1]))
                server._thread.join()
            return make(*given, **options)

        def raises():
            raise OSError("no device")

        others = []
        monkeypatch.setattr(llm, "advance", raises)
        monkeypatch.setattr(llm.requests, "request", ends)
        with pytest.raises(RuntimeError, match=why):
            server.stream(PROMPTS[0])
        for other in others:
            with pytest.raises(RuntimeError, match="no device"):
                await asyncio.wait_for(tokens_of(other), PATIENCE_S)

    asyncio.run(main())
