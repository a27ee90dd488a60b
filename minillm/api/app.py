"""Routes. A request is parsed, admitted and given to the engine; a client that goes away cancels it within a step.

POST /v1/completions, /v1/chat/completions        GET /v1/models, /v1/models/{name}
GET  /health (its engines run)  /ready (warm, not draining)  /metrics  / (a page to try it)
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from minillm.api.answers import DONE, Shape, TextOffsets, event
from minillm.api.connection import (
    ClosingResponse,
    OpenRequest,
    body_of,
    check_ending,
    drained,
    ends_if_it_raises,
    failure,
    pump,
    while_connected,
)
from minillm.api.entry import Entry
from minillm.api.errors import answer_errors
from minillm.api.limits import Admission, ApiError, Keys, Limits, shutting_down
from minillm.api.metrics import Metrics
from minillm.api.protocol import ChatRequest, CompletionRequest, parsed
from minillm.measure.start import Start
from minillm.serve.async_engine import AsyncLLM
from minillm.serve.engine import LLM
from minillm.serve.requests.params import SamplingParams

PAGE = Path(__file__).with_name("page.html")


@dataclass
class Served:
    """What clients ask for by a name while the app runs: a model's engine, or one of its adapters beside it."""

    llm: LLM
    engine: AsyncLLM
    adapter: str | None = None
    parent: str | None = None  # the name of an adapter's base

    @property
    def defaults(self) -> dict[str, Any]:
        """The checkpoint's own sampling, where it has one."""
        generation = self.llm.requests.generation
        found = dict(generation.sampling) if generation else {}
        return found if found.get("temperature") else {}


class Api:
    """What the routes share. models: engines by the names under which clients ask for them; their adapters have the
    names of their own stores. ValueError for a name that is there twice."""

    def __init__(self, models: dict[str, LLM], limits: Limits, keys: Keys, start: Start | None = None):
        names = [*models, *(name for llm in models.values() if llm.adapters for name in llm.adapters.names)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two models are called {twice!r}: give one of them another name.")
        self.models, self.limits, self.keys = models, limits, keys
        self.served: dict[str, Served] = {}
        self.start = start
        self.admission, self.metrics, self.ready = Admission(limits, keys), Metrics(models), False

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        engines = {name: Served(llm, AsyncLLM(llm)) for name, llm in self.models.items()}
        self.served = dict(engines)
        for base, served in engines.items():  # the first pass compiles, allocates, warms caches
            await served.engine.generate([0], SamplingParams(max_tokens=2, ignore_eos=True))
            for name in served.llm.adapters.names if served.llm.adapters else ():
                self.served[name] = replace(served, adapter=name, parent=base)
        if self.start is not None:
            self.start.end("warm-up")
            self.metrics.started(self.start)
        self.ready = True
        yield
        self.ready = False
        for served in engines.values():
            await served.engine.aclose()

    def model(self, name: str) -> Served:
        if name not in self.served:
            known = ", ".join(self.served)
            raise ApiError(404, f"no model {name!r} here: ask for {known}", param="model", code="model_not_found")
        return self.served[name]

    @property
    def healthy(self) -> bool:
        """Whether every engine still takes steps: one that failed amid a step does not begin again."""
        return all(served.engine.failure is None for served in self.served.values())

    async def submit(self, asked: Any, opened: OpenRequest) -> Shape:
        """Opens a stream for each prompt, all of them or none. ApiError for what cannot run."""
        served, chat = self.model(asked.model), isinstance(asked, ChatRequest)
        opened.model = asked.model
        count = (1 if chat else len(asked.prompts)) * (asked.n or 1)
        if count > self.limits.samples:
            raise ApiError(400, f"{count} answers are asked for: {self.limits.samples} are the limit", param="prompt")
        prompts = await asyncio.to_thread(self.token_ids, served.llm, asked)
        context, longest = served.llm.model.config.max_seq_len, max(map(len, prompts))
        if chat:
            asked.max_tokens = asked.max_completion_tokens or asked.max_tokens
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        else:
            logprobs = asked.logprobs
        room = max(1, context - longest) if chat else 16  # as OpenAI's two endpoints have it
        params = asked.sampling(served.defaults, logprobs, room)
        opened.take(sum(len(each) + params.n * min(params.max_tokens, context - len(each)) for each in prompts))
        try:
            for prompt in prompts:
                options = {"salt": opened.tenant, "timeout_s": self.limits.timeout_s, "adapter": served.adapter}
                opened.streams.append(await served.engine.open(prompt, params, **options))
        except RuntimeError as error:
            code = "engine_failure" if served.engine.failure else "overloaded"
            raise ApiError(503, str(error), "server_error", code=code) from error
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from error
        return Shape.new(asked.model, served.llm.tokenizer, chat, asked.counts_usage)

    def token_ids(self, llm: LLM, asked: Any) -> list[list[int]]:
        """Of each prompt; in a thread, since a long text takes seconds. ApiError for a prompt that is refused."""
        tokenizer, field = llm.tokenizer, "prompt"
        try:
            if isinstance(asked, ChatRequest):
                field = "messages"
                if tokenizer.chat_template is None:
                    what = f"{asked.model} has no chat template: use /v1/completions"
                    raise ApiError(400, what, param=field, code="no_chat_template")
                prompts = [tokenizer.chat(asked.conversation())]
            else:
                bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
                prompts = [bos + tokenizer.encode(each) if isinstance(each, str) else each for each in asked.prompts]
        except ValueError as error:
            raise ApiError(400, str(error), param=field) from error
        if not prompts or not all(prompts):
            raise ApiError(400, "the prompt is empty: give at least one token", param=field)
        longest, most, context = max(map(len, prompts)), self.limits.prompt_tokens, llm.model.config.max_seq_len
        if most is not None and longest > most:
            raise ApiError(400, f"a prompt of {longest} tokens: {most} are the limit", param=field)
        if longest >= context:
            what = f"a prompt of {longest} tokens does not fit: use 1 to {context - 1}"
            raise ApiError(400, what, param=field, code="context_length_exceeded")
        return prompts

    async def answer(self, request: Request, kind: type) -> Response:
        opened = OpenRequest(self.admission, self.metrics, request.state.tenant)
        with ends_if_it_raises(opened):
            try:
                content = json.loads(await body_of(request, self.limits.body_s))
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"the body is not JSON ({error})") from error
            asked = parsed(kind, content)
            shape = await self.submit(asked, opened)
            if asked.streams:
                opened.status = "ended early"
                chunks = self.chunks(shape, opened, request.state.id)
                return ClosingResponse(chunks, opened, self.limits.timeout_s + self.limits.unread_s)
            outputs = await while_connected(request, drained(opened.streams), self.admission)
            for output in outputs:
                for sample in output.answers:
                    check_ending(sample.reason)
            opened.status = "200"
        opened.end()
        return JSONResponse(shape.body(outputs))

    async def chunks(self, shape: Shape, opened: OpenRequest, request_id: str) -> AsyncIterator[bytes]:
        """Events of all prompts as they come. Once begun, an error is an event, too, and ends the stream."""
        streams = opened.streams
        each = len(streams[0].request.samples)
        queue: asyncio.Queue = asyncio.Queue()  # bounded by what the answers may have
        tasks = [asyncio.create_task(pump(place, stream, queue)) for place, stream in enumerate(streams)]
        offsets = [TextOffsets(shape.tokenizer) for _ in range(each * len(streams))]
        begun: set[int] = set()
        open_streams = len(streams)
        try:
            with self.admission.until_cut_off(lambda: queue.put_nowait((0, shutting_down()))):
                while open_streams:
                    place, item = await queue.get()
                    if item is None:
                        open_streams -= 1
                        for answer, sample in enumerate(streams[place].output.answers):
                            index = place * each + answer
                            if shape.chat and index not in begun:
                                yield shape.first(index)
                            check_ending(sample.reason)
                            yield shape.last(index, sample.reason)
                        continue
                    if isinstance(item, BaseException):
                        raise item if isinstance(item, ApiError) else failure(item)
                    index = place * each + item.sample
                    if shape.chat and index not in begun:
                        yield shape.first(index)
                    begun.add(index)
                    yield shape.piece(index, item.text, item.tokens, offsets[index])
            if shape.counts_usage:
                yield shape.counted([stream.output for stream in streams])
            opened.status = "200"
            yield DONE
        except ApiError as error:
            opened.status = str(error.status)
            yield event(error.body(request_id))
        finally:
            for task in tasks:
                task.cancel()


def create_app(
    models: dict[str, LLM], limits: Limits | None = None, keys: Keys | None = None, start: Start | None = None
) -> FastAPI:
    """models: engines with a tokenizer, by name; this app takes their steps while it runs. start: of this process,
    which ends with the warm-up."""
    api = Api(models, limits or Limits(), keys or Keys(), start)
    app = FastAPI(title="minillm", lifespan=api.lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.api = api
    answer_errors(app)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await api.answer(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await api.answer(request, ChatRequest)

    @app.get("/v1/models")
    async def models_list() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in api.served]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        api.model(name)
        return card(name)

    def card(name: str) -> dict[str, Any]:
        llm = api.served[name].llm
        chats = llm.tokenizer.chat_template is not None
        more = {
            "max_model_len": llm.model.config.max_seq_len,
            "chat": chats,
            "speculation": llm.speculation is not None,
        }
        parent = api.served[name].parent
        more |= {} if parent is None else {"parent": parent}
        return {"id": name, "object": "model", "created": 0, "owned_by": "minillm"} | more

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if api.healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if api.ready and api.healthy and not api.admission.draining else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        seen = api.keys.sees_only(request.state.tenant)
        return Response(api.metrics.text(seen), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text("utf-8"))

    app.add_middleware(Entry, keys=api.keys, most=api.limits.body_bytes)
    return app
