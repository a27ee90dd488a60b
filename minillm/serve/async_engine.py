"""The engine for programs that run on asyncio: many requests at once, each an `async for` over what is new of it.

    async with AsyncLLM(LLM(model, tokenizer=tokenizer)) as server:
        async for delta in server.stream("def ", SamplingParams(max_tokens=32)): ...

    consumers (event loop) ── stream ──▶ submitted ──▶ steps, in one thread ──▶ each consumer's own queue
                    gone: only marked as cancelled ─────────▲

Passes run in a thread, so the event loop never waits for one; torch lets go of the interpreter while it computes. A
step wakes each event loop once, with what is new for all its consumers: 256 calls into it would cost more than the
step's own bookkeeping. A consumer that breaks off, is cancelled or is dropped cancels its request.
"""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field

from minillm.serve.engine import LLM
from minillm.serve.requests.output import Delta, Output, OutputCursor, output_of
from minillm.serve.requests.params import SamplingParams
from minillm.serve.requests.request import Request


@dataclass(eq=False)
class _Listener:
    """Where the deltas of one request go. The thread holds it, and no stream: a stream that is dropped is collected."""

    request: Request
    news: OutputCursor
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)


News = tuple[_Listener, list[Delta | BaseException | None]]  # None or an exception: there will be no more


class EngineStopped(RuntimeError):
    """The engine takes no steps any more, which every request hears; others fail alone."""


class AsyncLLM:
    """llm: of which this takes the steps; other threads may use it, too. Close it with `async with` or `aclose`."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self._arrived: deque[_Listener] = deque()
        self._wake, self._closed, self._failure = threading.Event(), False, None
        self._door = threading.Lock()  # whoever has come in is answered: the thread ends with the door closed
        self._thread = threading.Thread(target=self._run, name="minillm engine", daemon=True)
        self._thread.start()

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None, **options) -> "Stream":
        """`LLM.stream`, to be called where an event loop runs. Its errors are raised here, at the call.

        A prompt that is text becomes tokens here, while the event loop waits; `open` does it in a thread.
        """
        self._check_open()
        request_id = options.pop("request_id", None)
        return self._submit(self.llm.requests.request(prompt, params, awaited=True, **options), request_id)

    async def open(self, prompt: str | list[int], params: SamplingParams | None = None, **options) -> "Stream":
        """`stream`, while other tasks go on."""
        self._check_open()
        request_id = options.pop("request_id", None)
        make = self.llm.requests.request
        return self._submit(await asyncio.to_thread(make, prompt, params, awaited=True, **options), request_id)

    async def generate(self, prompt: str | list[int], params: SamplingParams | None = None, **options) -> Output:
        """The whole answer. RuntimeError if the request failed."""
        stream = await self.open(prompt, params, **options)
        async for _ in stream:
            pass
        return stream.output

    @property
    def failure(self) -> str | None:
        """Why its thread has stopped by itself; None while it runs, or was closed."""
        return self._failure

    def _check_open(self) -> None:
        if self._closed or self._failure is not None:
            raise RuntimeError(f"this AsyncLLM takes no requests any more: it {self._failure or 'is closed'}.")

    def _submit(self, request: Request, request_id: str | None) -> "Stream":
        listener = _Listener(request, OutputCursor(request), asyncio.get_running_loop())
        stream = Stream(listener, self.llm)
        with self._door:
            self._check_open()
            self.llm.requests.submit(request, request_id)
            self._arrived.append(listener)
        self._wake.set()
        return stream

    async def aclose(self) -> None:
        """Cancels what has not ended, ends all streams and the thread. Again: nothing."""
        with self._door:
            self._closed = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_) -> None:
        await self.aclose()

    def _run(self) -> None:
        """The engine's thread: a step, then to each listener what is new of its request."""
        live: list[_Listener] = []
        try:
            while not self._closed or live or self._arrived:
                while self._arrived:
                    live.append(self._arrived.popleft())
                if not live:
                    if not self._wake.wait(self.llm.runner.beat_s):
                        self.llm.advance()  # nothing to compute, and ranks that follow hear so
                    self._wake.clear()
                    continue
                if self._closed:
                    self.llm.requests.cancelled.extend(listener.request for listener in live)
                self.llm.advance()
                live = self._deliver(live)
        except Exception as failure:
            with self._door:
                self._failure = f"stopped: {type(failure).__name__}: {failure}"
                left = [*live, *self._arrived]
            self.llm.requests.cancelled.extend(listener.request for listener in left)
            self._wake_loops([(listener, [EngineStopped(f"the engine {self._failure}")]) for listener in left])

    def _deliver(self, listeners: list[_Listener]) -> list[_Listener]:
        """Tells listeners what is new; returns those for whom there may be more."""
        news: list[News] = []
        going_on = []
        for listener in listeners:
            deltas, ended = listener.news.poll()
            if ended:
                news.append((listener, [*deltas, listener.news.failure()]))
                continue
            going_on.append(listener)
            if deltas:
                news.append((listener, deltas))
        self._wake_loops(news)
        return going_on

    def _wake_loops(self, news: list[News]) -> None:
        """One call into each event loop."""
        of_loop: dict[asyncio.AbstractEventLoop, list[News]] = {}
        for each in news:
            of_loop.setdefault(each[0].loop, []).append(each)
        for loop, mine in of_loop.items():
            try:
                loop.call_soon_threadsafe(_put, mine)
            except RuntimeError:  # it has closed: nobody listens any more
                self.llm.requests.cancelled.extend(listener.request for listener, _ in mine)


def _put(news: list[News]) -> None:
    """In the event loop."""
    for listener, items in news:
        for item in items:
            listener.queue.put_nowait(item)


class Stream:
    """An asynchronous iterator over the deltas of one request. output: what there is of it, all when this has ended."""

    def __init__(self, listener: _Listener, llm: LLM):
        self.request = listener.request
        self._listener, self._llm, self._ended = listener, llm, False

    @property
    def output(self) -> Output:
        return output_of(self.request)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._listener.queue.get()
        except BaseException:  # the consumer was cancelled
            self.close()
            raise
        if isinstance(item, Delta):
            return item
        self._ended = True
        if item is not None:
            raise item
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancels the request, if it has not ended: only a mark, which the next step carries out."""
        self._ended = True
        self._llm.requests.cancelled.append(self.request)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
