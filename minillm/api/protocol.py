"""Requests as OpenAI's clients send them: what is served, and one clear sentence for what is not.

`max_tokens`, `max_completion_tokens`, `temperature`, `top_p`, `seed`, `stop`, `n`, `logprobs`, `top_logprobs`, `stream`
and `stream_options.include_usage` are served; beside them the engine's own `top_k`, `min_p`, `repetition_penalty` and
`ignore_eos`. A field that would change the answer and is not served is refused; one that would not (`user`,
`metadata`, `store`) is left out.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minillm.api.limits import ApiError
from minillm.serve.requests.params import SamplingParams

NEUTRAL = {  # fields that are not served, by the values that ask for nothing
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": (None,),
}
LEFT_OUT = ("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
MOST_LOGPROBS, MOST_STOPS = 20, 16


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class _Asked(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow", strict=False)
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def counts_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: Mapping[str, Any], logprobs: int | None, room: int) -> SamplingParams:
        """defaults: the checkpoint's. room: tokens an answer may have where no number is asked for. ApiError for a
        value that the engine refuses."""
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise ApiError(400, f"stop has {len(self.stop)} texts: {MOST_STOPS} are the limit", param="stop")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        most = room if self.max_tokens is None else self.max_tokens
        own = {"max_tokens": most, "n": self.n or 1, "logprobs": logprobs, "ignore_eos": self.ignore_eos}
        try:
            return SamplingParams(**{"temperature": 1.0} | defaults | asked | own)
        except ValueError as error:
            raise ApiError(400, str(error)) from error


class CompletionRequest(_Asked):
    """POST /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if one else list(self.prompt)


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None

    def plain(self, place: int) -> dict[str, str]:
        """As a chat template takes it: parts of text are joined; ApiError for pictures, sound, calls of tools."""
        where = f"messages[{place}]"
        if self.role not in ("system", "developer", "user", "assistant"):
            raise ApiError(400, f"{where}: the role {self.role!r} is not served", param=f"{where}.role")
        content = [{"type": "text", "text": self.content or ""}] if not isinstance(self.content, list) else self.content
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                what = f"{where}: a part of type {part.get('type')!r} is not served, only text"
                raise ApiError(400, what, param=f"{where}.content")
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part["text"] for part in content)}


class ChatRequest(_Asked):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    def conversation(self) -> list[dict[str, str]]:
        return [message.plain(place) for place, message in enumerate(self.messages)]


def parsed(kind: type[_Asked], body: Any) -> Any:
    """The request; ApiError 400 that names the field, for what is malformed or not served."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "str", "int", "bool")))
        raise ApiError(400, f"{name}: {first['msg']}", param=name) from error
    for name, value in (asked.model_extra or {}).items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise ApiError(
                    400, f"{name} is not served here: leave it out", param=name, code="unsupported_parameter"
                )
        elif name not in LEFT_OUT:
            raise ApiError(400, f"unknown field {name!r}", param=name, code="unknown_parameter")
    return asked
