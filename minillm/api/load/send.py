"""One request to a server that speaks OpenAI's API, streamed, and what became of it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from minillm.bench.load import Arrival

Sender = Callable[[Arrival, float], Awaitable["Call"]]  # (what is due, the event loop's time at the start)
ENDED_EARLY = "ended early"  # a stream without its last line


@dataclass(frozen=True)
class Call:
    """A request that was sent. begun, first_token, last_token, ended: seconds from the start of the load.

    error: None, or its kind: "HTTP 429", "no connection", "connection lost", "timeout", "stream error: ...".
    """

    arrival: Arrival
    begun: float
    ended: float
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    error: str | None = None

    @property
    def late(self) -> float:
        """Seconds from when it was due to when it was sent: the generator's own delay, which counts as latency."""
        return self.begun - self.arrival.at

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival.at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of one."""
        if self.first_token is None or self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    @property
    def end_to_end(self) -> float:
        return self.ended - self.arrival.at


@dataclass
class _Progress:
    """What has come of an answer so far."""

    now: Callable[[], float]
    first: float | None = None
    last: float | None = None
    chunks: int = 0
    counted: int | None = None
    done: bool = False

    def read(self, data: str) -> None:
        """One event of the stream. ValueError if it is an error."""
        if data == "[DONE]":
            self.done = True
            return
        event: Any = json.loads(data)
        if error := event.get("error"):
            raise ValueError(f"stream error: {error.get('code') or error.get('type')}")
        if usage := event.get("usage"):
            self.counted = usage["completion_tokens"]
        choices = event.get("choices", ())
        if any(choice.get("text") or choice.get("finish_reason") is None for choice in choices):
            self.last = self.now()
            self.first = self.last if self.first is None else self.first
            self.chunks += 1

    @property
    def tokens(self) -> int:
        """As the server counts them; else a chunk is taken for a token."""
        return self.chunks if self.counted is None else self.counted


@dataclass(frozen=True)
class OverHttp:
    """A `Sender` for one server. keys: of tenants, by name; those without one send none. timeout_s: of a request."""

    client: httpx.AsyncClient
    model: str
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 120.0

    async def __call__(self, arrival: Arrival, start: float) -> Call:
        loop = asyncio.get_running_loop()
        begun = loop.time() - start
        progress, error = _Progress(lambda: loop.time() - start), None
        try:
            async with asyncio.timeout(self.timeout_s):
                error = await self._stream(arrival, progress)
        except TimeoutError:
            error = "timeout"
        except httpx.ConnectError:
            error = "no connection"
        except httpx.TransportError:
            error = "connection lost"
        except ValueError as problem:
            error = str(problem) if str(problem).startswith("stream error") else "stream error: not JSON"
        ended = loop.time() - start
        return Call(arrival, begun, ended, progress.first, progress.last, progress.tokens, error)

    async def _stream(self, arrival: Arrival, progress: _Progress) -> str | None:
        """Reads the answer; returns the kind of error, None if it came whole."""
        headers = {"authorization": f"Bearer {self.keys[arrival.tenant]}"} if arrival.tenant in self.keys else {}
        body = self.body(arrival)
        async with self.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                return f"HTTP {answer.status_code}"
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    progress.read(line[5:].strip())
        return None if progress.done else ENDED_EARLY

    def body(self, arrival: Arrival) -> dict[str, Any]:
        """Prompts go as token ids, so that their length is what the plan says."""
        params = arrival.params
        return {
            "model": self.model,
            "prompt": arrival.prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def http_client(url: str) -> httpx.AsyncClient:
    """As many connections as are needed: a pool that is full would be a queue of the generator's own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False)


async def model_of(client: httpx.AsyncClient, key: str | None = None) -> str:
    """The first model that the server names. ValueError, in one sentence, if it does not answer."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = await client.get("/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except httpx.HTTPStatusError as error:
        raise ValueError(
            f"{client.base_url} answers {error.response.status_code} to /v1/models: check its key"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"{client.base_url} does not answer ({error or type(error).__name__}): is it running?"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{client.base_url} lists no model at /v1/models: name one with --model") from None
