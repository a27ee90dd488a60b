"""The replicas behind a router: what each has open, whether it gets requests, and how it leaves without losing any.

add ──▶ starting ── /ready is 200 ──▶ ready ── fails twice, or nobody listens ──▶ ejected ── is well twice ──▶ ready
                                        └── drain ──▶ draining: keeps what it has, gets nothing ──▶ remove
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import httpx

from minillm.api.router.health import Health
from minillm.api.router.policies import Load, Policy

START_POLL_S = 0.1  # between the checks of a replica that was never ready


@dataclass(eq=False)
class Replica:
    """outstanding: requests it was sent that have not ended. ejected, idle: set while it is. looking: a check that was
    asked for beside the regular ones."""

    url: str
    health: Health = field(default_factory=Health)
    outstanding: int = 0
    draining: bool = False
    ejected: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    looking: asyncio.Task | None = None

    def __post_init__(self):
        self.idle.set()

    @property
    def state(self) -> str:
        if self.draining:
            return "draining"
        if self.health.ready:
            return "ready"
        return "ejected" if self.health.seen else "starting"

    def observe(self, ok: bool) -> None:
        self.health.observe(ok)
        self._tell()

    def eject(self) -> None:
        self.health.eject()
        self._tell()

    def _tell(self) -> None:
        if self.health.ready:
            self.ejected.clear()
        elif self.health.seen:
            self.ejected.set()

    def begin(self) -> None:
        self.outstanding += 1
        self.idle.clear()

    def end(self) -> None:
        self.outstanding -= 1
        if not self.outstanding:
            self.idle.set()


class Fleet:
    """Replicas by URL. To be used in one event loop, which runs their checks. interval_s, timeout_s: of a check.
    check_path: what answers 200 if a replica takes requests."""

    def __init__(
        self,
        policy: Policy,
        client: httpx.AsyncClient,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 5.0,
        check_path: str = "/ready",
    ):
        self.policy, self.client = policy, client
        self.interval_s, self.timeout_s, self.check_path = interval_s, timeout_s, check_path
        self.replicas: dict[str, Replica] = {}
        self._checks: dict[str, asyncio.Task] = {}

    def add(self, url: str) -> Replica:
        """It gets requests as soon as its /ready answers 200. ValueError for what is no URL, or there already."""
        url = checked_url(url)
        if url in self.replicas:
            raise ValueError(f"the replica {url} is there already")
        replica = self.replicas[url] = Replica(url)
        self._checks[url] = asyncio.create_task(self._watch(replica))
        return replica

    def choose(self, key: bytes, without: Collection[Replica] = ()) -> Replica | None:
        """One that is ready, by the policy; None if there is none beside `without`."""
        ready = [each for each in self.replicas.values() if each.state == "ready" and each not in without]
        if not ready:
            return None
        return ready[self.policy.choose([Load(each.url, each.outstanding) for each in ready], key)]

    @property
    def ready(self) -> bool:
        return any(replica.state == "ready" for replica in self.replicas.values())

    async def drain(self, url: str, timeout_s: float) -> int:
        """It gets no requests any more. Returns how many are still open when all have ended, or the time is over."""
        replica = self.of(url)
        replica.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await replica.idle.wait()
        except TimeoutError:
            pass
        return replica.outstanding

    def remove(self, url: str) -> None:
        """Whatever it has open goes on; nothing else reaches it."""
        replica = self.of(url)
        self._checks.pop(replica.url).cancel()
        del self.replicas[replica.url]

    def of(self, url: str) -> Replica:
        if (found := self.replicas.get(url.rstrip("/"))) is None:
            raise ValueError(f"there is no replica {url}: there are {', '.join(self.replicas) or 'none'}")
        return found

    async def close(self) -> None:
        for url in list(self.replicas):
            self.remove(url)

    async def look(self, replica: Replica) -> None:
        """A check at once, one for all who ask for it at the same time: is it gone, or did it lose one connection?"""
        if replica.looking is None:
            replica.looking = asyncio.create_task(self._check(replica))
            replica.looking.add_done_callback(lambda _: setattr(replica, "looking", None))
        await asyncio.shield(replica.looking)

    async def _check(self, replica: Replica) -> None:
        try:
            answer = await self.client.get(replica.url + self.check_path, timeout=self.timeout_s)
            replica.observe(answer.status_code == 200)
        except httpx.ConnectError:
            replica.eject()
        except httpx.HTTPError:
            replica.observe(False)

    async def _watch(self, replica: Replica) -> None:
        while True:
            await self._check(replica)
            await asyncio.sleep(self.interval_s if replica.health.seen else min(START_POLL_S, self.interval_s))


def checked_url(url: str) -> str:
    """Without a slash at its end; ValueError if requests cannot be sent there."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{url!r} is not a URL ({error}): write http://HOST:PORT") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment or parsed.userinfo:
        raise ValueError(f"{url!r} is not a server's URL: write http://HOST:PORT")
    return str(parsed).rstrip("/")
