"""Requests as OpenAI's clients send them: what is served, and one clear sentence for what is not.

`max_tokens`, `max_completion_tokens`, `temperature`, `top_p`, `seed`, `stop`, `n`, `logprobs`, `top_logprobs`, `stream`
and `stream_options.include_usage` are served; beside them the engine's own `top_k`, `min_p`, `repetition_penalty` and
`ignore_eos`. A field that would change the answer and is not served is refused; one that would not (`user`,
`metadata`, `store`) is left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, StrictBool, ValidationError

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
EXPECTED = {  # of fields that may be one of several things: pydantic speaks of the first
    "prompt": "give a text, a list of token ids, or a list of either",
    "stop": "give a text or a list of texts",
}
MOST_LOGPROBS, MOST_STOPS = 20, 16


class _FirstError(FailFast):
    """A list is refused with its first wrong item: an error for each of a million would take seconds and gigabytes."""

    __hash__ = object.__hash__  # unions of types need it


Whole = Annotated[int, Strict()]  # neither true, nor "5", nor 5.0
Number = Annotated[float, Strict()]
Ids = Annotated[list[Whole], _FirstError()]
Texts = Annotated[list[str], _FirstError()]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: StrictBool = False


class _Asked(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: Whole | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: Whole | None = Field(default=None, ge=1)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Number | None = Field(default=None, gt=0)
    seed: Whole | None = Field(default=None, ge=0, lt=2**63)
    stop: str | Texts | None = None
    n: Whole | None = Field(default=None, ge=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False

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

    prompt: str | Ids | Texts | Annotated[list[Ids], _FirstError()] = ""
    logprobs: Whole | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if one else list(self.prompt)


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Annotated[list[dict[str, Any]], _FirstError()] | None = None

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

    messages: Annotated[list[Message], _FirstError()] = Field(min_length=1)
    max_completion_tokens: Whole | None = Field(default=None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    def conversation(self) -> list[dict[str, str]]:
        return [message.plain(place) for place, message in enumerate(self.messages)]


def parsed(kind: type[_Asked], body: Any) -> Any:
    """The request; ApiError 400 that names the field, for what is malformed or not served."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field, *within = map(str, first["loc"])
        kinds = ("list[", "str", "constrained-str")  # of a union that pydantic tried
        name = ".".join([field, *(part for part in within if not part.startswith(kinds))])
        said = EXPECTED.get(field, first["msg"])
        raise ApiError(400, f"{name or 'a field'}: {said}", param=name) from error
    for name, value in (asked.model_extra or {}).items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise ApiError(
                    400, f"{name} is not served here: leave it out", param=name, code="unsupported_parameter"
                )
        elif name not in LEFT_OUT:
            raise ApiError(400, f"unknown field {name!r}", param=name, code="unknown_parameter")
    if asked.stream_options is not None and not asked.streams:
        raise ApiError(400, "stream_options is only for streams: set stream, or leave it out", param="stream_options")
    return asked
