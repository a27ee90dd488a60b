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
    listening = bind("127.0.0.1", 0)
    app = create_app({"draft": llm}, limits, keys)
    server = uvicorn.Server(uvicorn_config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        until(lambda: server.started, "the server did not start")
        yield Running(llm, url, server, app.state.api)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listening.close()
    assert not thread.is_alive()
