"""Routes of the router: those of the server, sent on, and `/replicas` for whoever operates it.

Keys, sizes and numbers are checked here first, by the server's own `Entry` and `Admission`; the header with the key
goes on to the replica. GET /health says that this process lives, /ready that a replica is ready.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from minillm.api.connection import ClosingResponse, body_of, ends_if_it_raises, while_connected
from minillm.api.entry import Entry
from minillm.api.errors import answer_errors
from minillm.api.limits import OPERATOR, Admission, ApiError, Keys, Limits
from minillm.api.router.budget import RetryBudget
from minillm.api.router.fleet import Fleet
from minillm.api.router.forward import SENT, Asked, Forwarder, Passing, Whole
from minillm.api.router.metrics import RouterMetrics
from minillm.api.router.policies import POLICIES
from minillm.api.router.prefix import prefix_key
from minillm.api.router.spawned import Spawned

KEEPALIVE_S = 3.0  # of connections to replicas, which close theirs after 5
CONNECT_S, WRITE_S = 5.0, 30.0
Seconds = Annotated[float, Query(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class RouterOptions:
    """policy: a name in `POLICIES`. load_bound, prefix_characters: of prefix affinity. attempts: of a request, at most.
    retry_share, retry_reserve: see `RetryBudget`. check_s, check_timeout_s: between two checks of a replica, and for
    one. silent_s: without a chunk of a stream that has begun; then its replica is taken for lost. check_path: see
    `Fleet`."""

    policy: str = "two-choices"
    load_bound: float = 1.25
    prefix_characters: int = 256
    attempts: int = 3
    retry_share: float = 0.2
    retry_reserve: float = 10.0
    check_s: float = 1.0
    check_timeout_s: float = 5.0
    silent_s: float = 60.0
    check_path: str = "/ready"

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"--policy {self.policy} is unknown: use one of {', '.join(POLICIES)}")
        if not self.check_path.startswith("/"):
            raise ValueError(f"--check-path {self.check_path} must begin with a slash, as /ready does")
        POLICIES[self.policy](self.load_bound)  # refuses a bound that cannot be
        RetryBudget(self.retry_share, self.retry_reserve)


class OpenForward:
    """A request from its admission to its end, which comes once. ApiError if it is not admitted."""

    def __init__(self, router: "Router", tenant: str):
        self.router, self.tenant, self.status, self._ended = router, tenant, "500", False
        self.began = asyncio.get_running_loop().time()
        self._watching = ExitStack()
        try:
            router.admission.enter(tenant)
        except ApiError as error:
            router.metrics.requests.labels(tenant, str(error.status)).inc()
            raise

    def first_event(self) -> None:
        seconds = asyncio.get_running_loop().time() - self.began
        self.router.metrics.first.labels(self.tenant).observe(seconds)

    def cut_off_with(self, stream: Passing) -> None:
        """The stream tells its client if the router ends before it."""
        self._watching.enter_context(self.router.admission.until_cut_off(stream.cut_off))

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._watching.close()
            self.router.metrics.requests.labels(self.tenant, self.status).inc()
            self.router.admission.leave(self.tenant)


class Router:
    """What the routes share. replicas: URLs. spawn: makes `Spawned` of a fleet; it runs while the app does."""

    def __init__(
        self,
        replicas: Sequence[str],
        options: RouterOptions,
        limits: Limits,
        keys: Keys,
        spawn: Callable[[Fleet], Spawned] | None = None,
    ):
        self.options, self.limits, self.keys = options, limits, keys
        self.admission, self.metrics = Admission(limits, keys), RouterMetrics()
        self.budget = RetryBudget(options.retry_share, options.retry_reserve)
        self._urls, self._spawn = list(replicas), spawn
        self.fleet: Fleet | None = None
        self.forwarder: Forwarder | None = None
        self.spawned: Spawned | None = None

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        options = self.options
        timeout = httpx.Timeout(None, connect=CONNECT_S, write=WRITE_S)
        connections = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S)
        async with httpx.AsyncClient(timeout=timeout, limits=connections, trust_env=False) as client:
            policy = POLICIES[options.policy](options.load_bound)
            checks = {"interval_s": options.check_s, "timeout_s": options.check_timeout_s}
            self.fleet = Fleet(policy, client, **checks, check_path=options.check_path)
            self.forwarder = Forwarder(self.fleet, self.budget, self.metrics, options.attempts, options.silent_s)
            try:
                for url in self._urls:
                    self.fleet.add(url)
                if self._spawn is not None:
                    self.spawned = self._spawn(self.fleet)
                    self.spawned.begin()
                yield
            finally:
                if self.spawned is not None:
                    await self.spawned.close()
                await self.fleet.close()

    async def answer(self, request: Request) -> Response:
        """Sends a completion or a chat on; admitted before its body is read."""
        opened = OpenForward(self, request.state.tenant)
        with ends_if_it_raises(opened):
            body = await body_of(request, self.limits.body_s)
            key = await self._key(opened.tenant, body)
            sent = self._sent_on(asked_by(request, body, key))
            answer = await while_connected(request, sent, self.admission)
        if isinstance(answer, Passing):
            opened.first_event()
            opened.status = "200"
            opened.cut_off_with(answer)
            response = ClosingResponse(answer, opened, self.limits.timeout_s + self.limits.unread_s)
            response.headers.update(answer.headers)
            return response
        opened.status = str(answer.status)
        opened.end()
        return Response(answer.body, answer.status, answer.headers)

    async def _sent_on(self, asked: Asked) -> Passing | Whole:
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                return await self.forwarder.send(asked)
        except TimeoutError:
            what = "no replica answered within this router's --timeout"
            raise ApiError(504, what, "server_error", code="timeout") from None

    async def _key(self, tenant: str, body: bytes) -> bytes:
        if not self.fleet.policy.uses_key:
            return b""
        return await asyncio.to_thread(prefix_key, tenant, body, self.options.prefix_characters)

    def check_operator(self, request: Request) -> None:
        """ApiError 403 for a tenant; without keys everybody who reaches this address is an operator."""
        if self.keys.secrets and request.state.tenant != OPERATOR:
            what = "only the operator's key (--admin-key) may see and change the replicas"
            raise ApiError(403, what, "permission_error", code="not_the_operator")

    @property
    def own(self) -> Spawned:
        if self.spawned is None:
            raise ApiError(400, "these replicas were not spawned here: start the router with --spawn", code="no_spawn")
        return self.spawned


def asked_by(request: Request, body: bytes = b"", key: bytes = b"") -> Asked:
    """What a replica is sent. Not the operator's key, which is this router's own. ApiError 404 for a path with segments
    that would lead elsewhere there."""
    is_operators = getattr(request.state, "tenant", OPERATOR) == OPERATOR  # open paths have no tenant
    own_key = (b"authorization",) if is_operators else ()
    headers = [(name, value) for name, value in request.headers.raw if name in SENT and name not in own_key]
    if any(part in (".", "..") for part in request.scope["path"].split("/")):
        raise ApiError(404, "a path with . or .. leads nowhere here", code="not_found")
    query = request.scope["query_string"]
    path = request.scope["raw_path"] + (b"?" + query if query else b"")
    return Asked(request.method, path.decode("latin-1"), headers, body, request.state.id, key)


def create_router(
    replicas: Sequence[str],
    options: RouterOptions | None = None,
    limits: Limits | None = None,
    keys: Keys | None = None,
    spawn: Callable[[Fleet], Spawned] | None = None,
) -> FastAPI:
    """replicas: URLs of servers; spawn: see `Router`."""
    router = Router(replicas, options or RouterOptions(), limits or Limits(), keys or Keys(), spawn)
    app = FastAPI(title="minillm router", lifespan=router.lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.api = router
    answer_errors(app)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def answers(request: Request) -> Response:
        return await router.answer(request)

    @app.get("/")
    @app.get("/v1/models")
    @app.get("/v1/models/{name:path}")
    async def any_replica(request: Request) -> Response:
        answer = await router.forwarder.send(asked_by(request))
        return Response(answer.body, answer.status, answer.headers)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if router.fleet.ready and not router.admission.draining else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        seen = router.keys.sees_only(request.state.tenant)
        content = router.metrics.text(router.fleet, router.budget.balance, seen)
        return Response(content, media_type="text/plain; version=0.0.4")

    @app.get("/replicas")
    async def replicas_list(request: Request) -> list[dict[str, Any]]:
        router.check_operator(request)
        return [shown(each) for each in router.fleet.replicas.values()]

    @app.post("/replicas")
    async def add(request: Request) -> JSONResponse:
        router.check_operator(request)
        url = await field_of(request, router.limits.body_s, "url", str)
        return JSONResponse(shown(refusing(router.fleet.add, url)), 201)

    @app.delete("/replicas")
    async def remove(request: Request, url: str = "", wait_s: Seconds = 30.0) -> dict[str, Any]:
        """Answers when it has left; `outstanding` then is what was not over within `wait_s`."""
        router.check_operator(request)
        replica = refusing(router.fleet.of, url)
        if router.spawned is not None and replica.url in (*router.spawned.running, *router.spawned.retiring):
            raise ApiError(400, f"{replica.url} was spawned here: lower the number with POST /replicas/count")
        left = await router.fleet.drain(replica.url, wait_s)
        if replica.url in router.fleet.replicas:  # else somebody else has removed it meanwhile
            router.fleet.remove(replica.url)
        return {"url": replica.url, "outstanding": left}

    @app.post("/replicas/count")
    async def resize(request: Request) -> dict[str, Any]:
        """Answers at once: new ones start, others are drained, while requests go on."""
        router.check_operator(request)
        count = await field_of(request, router.limits.body_s, "count", int)
        refusing(router.own.want, count)
        return {"wanted": router.own.wanted}

    @app.post("/replicas/restart")
    async def restart(request: Request) -> dict[str, Any]:
        """Answers when every replica was replaced by a new one, one after the other."""
        router.check_operator(request)
        try:
            return {"restarted": await router.own.restart()}
        except (RuntimeError, ValueError) as error:
            raise ApiError(503, str(error), "server_error", code="restart_failed") from error

    app.add_middleware(Entry, keys=router.keys, most=router.limits.body_bytes)
    return app


def shown(replica: Any) -> dict[str, Any]:
    return {"url": replica.url, "state": replica.state, "outstanding": replica.outstanding}


def refusing(call: Callable, *given: Any) -> Any:
    """What the call returns; its ValueError becomes an ApiError 400."""
    try:
        return call(*given)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


async def field_of(request: Request, seconds: float, name: str, kind: type) -> Any:
    """The one field of a JSON body."""
    try:
        content = json.loads(await body_of(request, seconds))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error
    value = content.get(name) if isinstance(content, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ApiError(400, f'the body must be {{"{name}": ...}} with a {kind.__name__}', param=name)
    return value
