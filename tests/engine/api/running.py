"""A server in a thread of the test's process: the engine behind it can be looked at and compared with."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import torch

from minillm.data import Tokenizer
from minillm.model import load_hf
from minillm.model.generate import folder_of
from minillm.serve.engine import LLM

pytest.importorskip("fastapi", reason="the server's packages are not installed: requirements.txt")
import uvicorn
from fastapi import FastAPI

from minillm.api.app import Api, create_app
from minillm.api.limits import Keys, Limits
from minillm.api.run import bind, uvicorn_config

PATIENCE_S = 60
TEMPLATE = (
    "{% for message in messages %}{{ '# ' + message.role + '\n' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant\n' }}{% endif %}"
)


def engine(**options) -> LLM:
    """The committed draft model in float32, with a template that makes a conversation of comments."""
    folder = folder_of("draft")
    tokenizer = Tokenizer.load(folder)
    tokenizer.chat_template = TEMPLATE
    return LLM(load_hf(folder, dtype=torch.float32), tokenizer=tokenizer, **options)


@dataclass
class Running:
    llm: LLM
    url: str
    server: uvicorn.Server
    api: Api

    def idle(self) -> None:
        """Waits until nothing is open; AssertionError if blocks are held by then."""
        until(lambda: self.llm.unfinished == 0 and self.llm.pool.used == 0)
        until(lambda: self.api.admission.open.total() == 0, "a request that has ended still counts as open")

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until(fits, what: str = "") -> None:
    end = time.monotonic() + PATIENCE_S
    while not fits():
        assert time.monotonic() < end, what or "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def running(llm: LLM, limits: Limits | None = None, keys: Keys | None = None) -> Iterator[Running]:
    app = create_app({"draft": llm}, limits, keys)
    with listening(app) as (url, server):
        yield Running(llm, url, server, app.state.api)


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[tuple[str, uvicorn.Server]]:
    """The app in a thread, and where it listens."""
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the server did not start")
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        bound.close()
    assert not thread.is_alive()
