"""What HTTP costs beside the engine alone, and minillm's server beside `transformers serve`: `bench http`.

    streams          the same greedy answers from one engine, asked through its HTTP server and without it, all in one
                     process: seconds of the whole divided by tokens, so what HTTP adds to each token of all streams.
                     The client's reading of the stream is part of it, and shares the interpreter with the server
    at once          `minillm serve` and `transformers serve --continuous-batching` as processes, with the same model
                     in float32, blocks and tokens a step: requests per second, and time to first token

Both sides are read by the same client, which looks for the ends of events and little else. Texts are compared first.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from minillm.api.app import create_app
from minillm.api.run import bind, uvicorn_config
from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, side_by_side
from minillm.data import Tokenizer, corpus, tokenize
from minillm.model.generate import folder_of
from minillm.serve.async_engine import AsyncLLM
from minillm.serve.engine import LLM
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.summary import percentiles

STREAMS = (1, 16, 64)
PROMPT, ANSWER = 32, 32  # tokens
ENGINE = {"num_blocks": 2048, "block_size": 16, "token_budget": 512, "max_num_seqs": 64}
START_S = 180.0  # for a server to be ready
WITHOUT = "the same engine, asked without HTTP"
METRICS: dict[str, tuple[str, float, Callable[["Answered"], float]]] = {  # what -> unit, scale, value
    "requests": ("requests/s", 1.0, lambda answered: answered.requests_per_s),
    "TTFT p50": ("ms", 1e3, lambda answered: percentiles(answered.ttft, [0.5])[0]),
    "TTFT p99": ("ms", 1e3, lambda answered: percentiles(answered.ttft, [0.99])[0]),
}


@dataclass(frozen=True)
class Answered:
    """Of requests that were sent together. texts in their order; ttft in seconds of each."""

    texts: list[str]
    ttft: list[float]
    seconds: float

    @property
    def requests_per_s(self) -> float:
        return len(self.texts) / self.seconds


@dataclass(frozen=True)
class Server:
    """Where completions are asked for, and what is sent there with a prompt."""

    title: str
    url: str
    asked: dict[str, Any]

    def answer(self, prompts: Sequence[str]) -> Answered:
        """Streams all of them at once."""
        return asyncio.run(self._together(prompts))

    async def _together(self, prompts: Sequence[str]) -> Answered:
        start = time.perf_counter()
        answers = await asyncio.gather(*map(self._stream, prompts))
        seconds = time.perf_counter() - start
        return Answered([text for text, _ in answers], [first - start for _, first in answers], seconds)

    async def _stream(self, prompt: str) -> tuple[str, float]:
        """The text, and when its first piece came. ValueError for an answer that is none."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        body = json.dumps(self.asked | {"prompt": prompt, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        try:
            writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
            came, first = b"", 0.0
            while piece := await reader.read(1 << 16):
                first = first or (time.perf_counter() if b'"text":"' in piece else 0.0)
                came += piece
        finally:
            writer.close()
        if not came.startswith(b"HTTP/1.1 200") or b'data: {"error"' in came:
            raise ValueError(f"{self.title} answered {came[:60]!r} ... {came[-300:]!r}")
        return text_of(came), first


def text_of(came: bytes) -> str:
    """Of a whole stream of events, sent in chunks."""
    lines = [line for line in came.split(b"\r\n") if b"data: {" in line]
    events = [part for line in lines for part in line.split(b"\n\n") if part.startswith(b"data: {")]
    choices = [choice for each in events for choice in json.loads(each.removeprefix(b"data: "))["choices"]]
    return "".join(choice["text"] for choice in choices)


def run(repeats: int = 5, streams: Sequence[int] = STREAMS) -> list[BenchRow]:
    """All rows for the committed target model in float32. streams: numbers of requests at once."""
    check_repeats(repeats)
    prompts = texts(max(streams))
    return [*overhead(prompts, streams, repeats), *peers(prompts, streams, repeats)]


def texts(count: int) -> list[str]:
    tokenizer = Tokenizer.load()
    tokens = tokenize(corpus(), tokenizer).array
    return [tokenizer.decode(tokens[start : start + PROMPT].tolist()) for start in range(0, 1000 * count, 1000)]


def overhead(prompts: Sequence[str], streams: Sequence[int], repeats: int) -> list[BenchRow]:
    """One engine in this process, with and without HTTP."""
    llm = LLM.load(folder_of("target"), **ENGINE)
    rows = []
    with in_thread(llm) as (server, engine):
        for count in streams:
            asked = prompts[:count]
            compared = side_by_side(
                lambda asked=asked: server.answer(asked).texts == without_http(engine, asked).texts,
                lambda asked=asked: server.answer(asked).seconds / (len(asked) * ANSWER),
                lambda asked=asked: without_http(engine, asked).seconds / (len(asked) * ANSWER),
                repeats,
            )
            rows.append(bench_row(f"{count} streams over HTTP: time per token", WITHOUT, compared, "µs", 1e6))
    return rows


@contextlib.contextmanager
def in_thread(llm: LLM) -> Iterator[tuple[Server, AsyncLLM]]:
    """A server of this process, and the engine behind it."""
    app, listening = create_app({"target": llm}), bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield Server("minillm", url, OURS), app.state.api.served["target"].engine
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def without_http(engine: AsyncLLM, prompts: Sequence[str]) -> Answered:
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)

    async def one(prompt: str) -> tuple[str, float]:
        first, pieces = 0.0, []
        async for delta in await engine.open(prompt, params):
            first = first or time.perf_counter()
            pieces.append(delta.text)
        return "".join(pieces), first

    async def together() -> Answered:
        start = time.perf_counter()
        answers = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - start
        return Answered([text for text, _ in answers], [first - start for _, first in answers], seconds)

    return asyncio.run(together())


def peers(prompts: Sequence[str], streams: Sequence[int], repeats: int) -> list[BenchRow]:
    """Two servers as processes; where the peer does not run, minillm's rows say so."""
    rows = []
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(process("minillm serve", OUR_COMMAND, OURS))
        try:
            theirs = stack.enter_context(process("transformers serve", their_command(), their_body()))
            theirs.answer(prompts[:1])  # which loads the model
        except (ValueError, OSError) as problem:
            reason = str(problem).splitlines()[0][:100]
            return [row for count in streams for row in alone(ours, prompts[:count], repeats, reason)]
        for count in streams:
            asked = prompts[:count]
            found = side_by_side(
                lambda asked=asked: ours.answer(asked).texts == theirs.answer(asked).texts,
                lambda asked=asked: ours.answer(asked),
                lambda asked=asked: theirs.answer(asked),
                repeats,
                warmup=1,
            )
            for what, (unit, scale, value) in METRICS.items():
                pairs = tuple((value(mine), value(its)) for mine, its in found.pairs)
                each, faster = Comparison(found.correct, pairs), what == "requests"
                rows.append(bench_row(f"{count} at once: {what}", theirs.title, each, unit, scale, faster))
    return rows


def alone(ours: Server, prompts: Sequence[str], repeats: int, reason: str) -> list[BenchRow]:
    answered = [ours.answer(prompts) for _ in range(repeats)]
    alike = len({tuple(each.texts) for each in answered}) == 1  # all that can be compared
    peer, rows = f"transformers serve, not compared: {reason}", []
    for what, (unit, scale, value) in METRICS.items():
        values = [scale * value(each) for each in answered]
        name = f"{len(prompts)} at once: {what}"
        rows.append(BenchRow(name, peer, percentiles(values, [0.5])[0], None, unit, None, None, repeats, alike))
    return rows


OURS = {"model": "target", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
OUR_COMMAND = [
    *(sys.executable, "-m", "minillm", "serve", "--model=target", "--speculate=none", "--port={port}"),
    *(f"--{name.replace('_', '-')}={ENGINE[name]}" for name in ("token_budget", "max_num_seqs")),
]


def their_command() -> list[str]:
    start = "from transformers.cli.transformers import main; main()"
    blocks = [f"--cb-block-size={ENGINE['block_size']}", f"--cb-num-blocks={ENGINE['num_blocks']}"]
    options = ["--continuous-batching", "--device=cpu", "--dtype=float32", "--host=127.0.0.1", "--port={port}"]
    options += [*blocks, f"--cb-max-batch-tokens={ENGINE['token_budget']}"]
    return [sys.executable, "-c", start, "serve", str(folder_of("target")), *options]


def their_body() -> dict[str, Any]:
    """Greedy answers that nothing but their length ends."""
    generation = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return {"model": str(folder_of("target")), "generation_config": json.dumps(generation)}


@contextlib.contextmanager
def process(title: str, command: Sequence[str], asked: dict[str, Any]) -> Iterator[Server]:
    """A server that answers /health. ValueError, with its last words, if it ends before or does not start in time."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    url, offline = f"http://127.0.0.1:{port}", {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile(prefix="minillm-", suffix=".log") as log:
        arguments = [each.format(port=port) for each in command]
        running = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, env=os.environ | offline)
        try:
            end = time.monotonic() + START_S
            while not is_healthy(url):
                if running.poll() is not None:
                    said = Path(log.name).read_text(errors="replace").strip().splitlines() or ["nothing"]
                    raise ValueError(f"{title} ended at its start: {said[-1]}")
                if time.monotonic() > end:
                    raise ValueError(f"{title} was not ready within {START_S:g} seconds")
                time.sleep(0.1)
            yield Server(title, url, asked)
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
