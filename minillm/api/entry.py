"""Where a request comes in: its id, its key, its size, and whether it comes from this machine if there are no keys."""

import ipaddress
import re
import secrets

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.api.limits import ApiError, Keys

OPEN_PATHS = ("/health", "/ready", "/")  # need no key: probes, and the page that asks for one
REQUEST_ID = re.compile("req-[0-9a-f]{16}")


class Entry:
    """The outermost layer: gives each request an id, asks for its key, and refuses a body that is too long before it
    is kept, by its Content-Length or when more than that has come."""

    def __init__(self, app: ASGIApp, keys: Keys, most: int):
        self.app, self.keys, self.most = app, keys, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        given = headers.get(b"x-request-id", "")  # a router's
        state["id"] = request_id = given if REQUEST_ID.fullmatch(given) else new_request_id()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            if not self.keys.secrets:
                check_local(headers.get(b"host"), headers.get(b"origin"))
            if scope["path"] not in OPEN_PATHS:
                state["tenant"] = self.keys.tenant(headers.get(b"authorization"))
            self._check(int(headers.get(b"content-length", "0")))
        except ApiError as error:  # the body is not read, so the connection cannot serve another request
            answer = JSONResponse(error.body(request_id), error.status, {"connection": "close"})
            await answer(scope, receive, named)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            self._check(seen)
            return message

        await self.app(scope, counted, named)

    def _check(self, length: int) -> None:
        if length > self.most:
            raise ApiError(413, f"the body has more than {self.most:,} bytes", code="body_too_large")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


def check_local(host: str | None, origin: str | None) -> None:
    """ApiError 403 for what a page from elsewhere makes a browser on this machine send. It has no key to steal, but the
    page's own name in Host (after its DNS entry was changed to 127.0.0.1) or in Origin.

    host, origin: of the headers, None where there are none.
    """
    name = "localhost" if host is None else re.sub(r":\d*$", "", host).strip("[]")
    if not is_loopback(name):
        what = f"a server without keys answers this machine only, and {host!r} is another name: use localhost"
        raise ApiError(403, what, code="host_not_allowed")
    if origin is not None and origin != f"http://{host}":
        what = f"a server without keys answers no pages of other servers, here of {origin!r}: start it with --api-key"
        raise ApiError(403, what, code="origin_not_allowed")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
