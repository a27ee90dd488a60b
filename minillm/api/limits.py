"""Who may ask for how much: keys, sizes and numbers, each refused with OpenAI's error body and the right status."""

import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.api.tenants import Terms
from minillm.files import opened
from minillm.serve.schedule.fair import Share

SHORTEST_KEY = 8
OPERATOR = "operator"  # the tenant that may see what all tenants do
LARGEST_KEYS = 16 << 20  # bytes of a file of keys
LONGEST_MESSAGE, LONGEST_PARAM = 1000, 100  # characters of an error


class ApiError(Exception):
    """An answer that is an error. kind, param and code are fields of OpenAI's error body. retry_after_s: said with 429
    and 503.

    A message may quote what the client sent: it is cut, and what UTF-8 cannot hold is replaced.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str = "",
        retry_after_s: float = 1.0,
    ):
        message = _printable(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.status, self.message, self.kind, self.code = status, message, kind, code
        self.retry_after_s = retry_after_s
        self.param = None if param is None else _printable(param, LONGEST_PARAM)

    def body(self, request_id: str) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code or None}
        return {"error": error | {"request_id": request_id}}


@dataclass(frozen=True)
class Limits:
    """body_bytes: of a request. prompt_tokens: None = what the model takes. samples: n times prompts of a request.
    open_requests: of all tenants together, per_tenant: of each. timeout_s: from arrival to the last token. body_s:
    seconds for a body to arrive. unread_s: seconds beyond timeout_s for a client to read its stream."""

    body_bytes: int = 4 << 20
    prompt_tokens: int | None = None
    samples: int = 16
    open_requests: int = 1024
    per_tenant: int = 1024
    timeout_s: float = 600.0
    body_s: float = 30.0
    unread_s: float = 30.0


@dataclass
class Keys:
    """Secrets by tenant. Without any, everybody is the tenant "default". terms: of tenants that have some."""

    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    terms: dict[str, Terms] = field(default_factory=dict)

    @classmethod
    def read(cls, key: str | None, file: Path | None) -> "Keys":
        """key: one for all. file: lines "tenant key", and `Terms` after that; lines that begin with # are left out.
        ValueError if a line is not."""
        found = {} if key is None else {"default": key}
        terms: dict[str, Terms] = {}
        if file is not None:
            for number, line in enumerate(_lines(file), 1):
                words = line.split()
                if not words or words[0].startswith("#"):
                    continue
                if len(words) < 2:
                    raise ValueError(f"{file}, line {number}: write a tenant's name and its key, with a space between")
                if words[0] in found:
                    raise ValueError(f"{file}, line {number}: the tenant {words[0]!r} stands there twice")
                if words[1] in found.values():
                    raise ValueError(f"{file}, line {number}: {words[0]!r} has the key of another tenant")
                found[words[0]] = words[1]
                try:
                    terms[words[0]] = Terms.read(words[2:])
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: {error}") from None
        if any(len(secret) < SHORTEST_KEY for secret in found.values()):
            raise ValueError("a key (--api-key, --api-keys) has fewer than 8 characters: choose a longer one")
        return cls(found, terms)

    def with_tenant(self, name: str, secret: str, option: str) -> "Keys":
        """These and one more. ValueError, which names the option, if the name or the key is another's."""
        if name in self.secrets or secret in self.secrets.values():
            raise ValueError(f"{option}: a tenant is named {name!r} or has the same key: change one of them")
        if len(secret) < SHORTEST_KEY:
            raise ValueError(f"{option} has fewer than {SHORTEST_KEY} characters: choose a longer one")
        return Keys(self.secrets | {name: secret}, self.terms)

    def sees_only(self, tenant: str) -> str | None:
        """Of whom a tenant may see numbers: of itself, None = of everybody if it is the operator or the only one."""
        return None if tenant == OPERATOR or len(self.secrets) < 2 else tenant

    def tenant(self, authorization: str | None) -> str:
        """Whose "Bearer KEY" this is; ApiError 401 if nobody's. Compares with every key, in constant time each.

        authorization: the header's bytes as latin-1, as ASGI servers decode them.
        """
        if not self.secrets:
            return "default"
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        known = [name for name, secret in self.secrets.items() if hmac.compare_digest(given, secret.encode())]
        if not known:
            raise ApiError(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")
        return known[0]


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down: ask another replica", "server_error", code="draining")


def shares_of(keys: Keys) -> dict[str, Share]:
    """For a `FairScheduler`: what each tenant's terms say of the engine."""
    return {name: Share(terms.weight, terms.running) for name, terms in keys.terms.items()}


def _printable(text: str, most: int) -> str:
    shown = text if len(text) <= most else text[:most] + "..."
    return shown.encode("utf-8", "replace").decode()


def _lines(file: Path) -> list[str]:
    try:
        with opened(file, "rb") as source:  # of which a device such as /dev/zero has no end
            text = source.read(LARGEST_KEYS + 1)
        if len(text) > LARGEST_KEYS:
            raise ValueError(f"--api-keys {file} is larger than {LARGEST_KEYS >> 20} MiB: give a file of keys")
        return text.decode("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--api-keys {file} cannot be read ({error}): give a text file of tenants and keys") from None


class Admission:
    """Counts open requests, from before their body is read. Nothing waits: a request enters or is refused."""

    def __init__(self, limits: Limits, keys: Keys):
        self.limits, self.keys, self.open = limits, keys, Counter()
        self.buckets = {name: bucket for name, terms in keys.terms.items() if (bucket := terms.bucket()) is not None}
        self.draining = False
        self._cut_off: set[Callable[[], None]] = set()

    @contextmanager
    def until_cut_off(self, tell: Callable[[], None]) -> Iterator[None]:
        """Within it, `tell` is called if the time that open requests have after SIGTERM is over."""
        self._cut_off.add(tell)
        try:
            yield
        finally:
            self._cut_off.discard(tell)

    def cut_off(self) -> None:
        """Ends what is still open; each answers `shutting_down`."""
        for tell in list(self._cut_off):
            tell()

    def enter(self, tenant: str) -> None:
        if self.draining:
            raise shutting_down()
        own = self.keys.terms.get(tenant, Terms()).open
        if self.open[tenant] >= min(self.limits.per_tenant, self.limits.per_tenant if own is None else own):
            what = f"{self.open[tenant]} requests of this tenant are open, which is its limit"
            raise ApiError(429, f"{what}: wait for one to end", "rate_limit_error", code="rate_limit_exceeded")
        if self.open.total() >= self.limits.open_requests:
            what = f"{self.open.total()} requests are open, which is the server's limit"
            raise ApiError(503, f"{what}: try again later", "server_error", code="overloaded")
        self.open[tenant] += 1

    def leave(self, tenant: str) -> None:
        self.open[tenant] -= 1

    def take(self, tenant: str, tokens: int) -> None:
        """Tokens that a request may use, before it runs; what it does not is `put_back`. ApiError 429 with the seconds
        to wait if the tenant's rate does not allow it now."""
        bucket = self.buckets.get(tenant)
        if bucket is not None and (wait_s := bucket.take(tokens)) > 0:
            what = f"{tokens} tokens are more than this tenant's rate allows now: wait {wait_s:.1f} seconds"
            raise ApiError(429, what, "rate_limit_error", code="rate_limit_exceeded", retry_after_s=wait_s)

    def put_back(self, tenant: str, tokens: int) -> None:
        if tenant in self.buckets:
            self.buckets[tenant].put_back(tokens)
