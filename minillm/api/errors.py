"""How an error becomes an answer: OpenAI's error body, the right status, the request's id, and never a traceback."""

import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from minillm.api.limits import ApiError

KINDS = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}
log = logging.getLogger("uvicorn.error")


def answer_errors(app: FastAPI) -> None:
    """Adds the handlers. The app's outermost layer is `Entry`, which gives each request its id."""

    def refused(request: Request, error: ApiError) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(error.retry_after_s))} if error.status in (429, 503) else {}
        if error.status in (408, 413):
            headers["connection"] = "close"  # what is left of the body is not a request
        return JSONResponse(error.body(request.state.id), error.status, headers)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return refused(request, error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        kind = KINDS.get(error.status_code, "invalid_request_error")
        what = f"{request.method} {request.url.path}: {error.detail}"
        return refused(request, ApiError(error.status_code, what, kind))

    @app.exception_handler(RequestValidationError)
    async def on_bad_parameter(request: Request, error: RequestValidationError) -> JSONResponse:
        """Of the query: FastAPI's own answer is a 422 in another shape."""
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return refused(request, ApiError(400, f"{name} {first['input']!r}: {first['msg']}", param=name))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        """No traceback leaves the server: it stands in the log, beside the id that the client gets."""
        log.error("%s failed:", request.state.id)  # uvicorn logs the traceback next
        answer = refused(request, ApiError(500, "the server failed; its log has more", "server_error"))
        answer.headers["x-request-id"] = request.state.id  # `Entry` is within what calls this
        return answer
