"""Answers in OpenAI's shape: whole bodies, and the chunks of a stream, which hold the same texts piece by piece."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.data import Tokenizer
from minillm.serve.requests.output import Answer, Output
from minillm.serve.requests.params import Token

DONE = b"data: [DONE]\n\n"
REASONS = {"stop": "stop", "length": "length"}  # anything else is an error or a cancelled request


@dataclass(frozen=True)
class Shape:
    """One kind of answer. chat: messages instead of texts."""

    model: str
    tokenizer: Tokenizer
    chat: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, model: str, tokenizer: Tokenizer, chat: bool) -> "Shape":
        return cls(model, tokenizer, chat, ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12))

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """outputs: one for each prompt; choices are numbered through all of their samples."""
        answers = [answer for output in outputs for answer in output.answers]
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return self._head(kind) | {"choices": choices, "usage": usage(outputs)}

    def first(self, index: int) -> bytes:
        """A chat's stream begins by saying who speaks."""
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def piece(self, index: int, text: str, tokens: Sequence[Token], offset: int) -> bytes:
        """offset: characters of the answer before this piece."""
        logprobs = self._logprobs(tokens, offset)
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._chunk([{"index": index} | content | {"logprobs": logprobs, "finish_reason": None}])

    def last(self, index: int, reason: str | None) -> bytes:
        content = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk([{"index": index} | content | {"finish_reason": REASONS.get(reason or "", "stop")}])

    def counted(self, outputs: Sequence[Output]) -> bytes:
        return self._chunk([], usage=usage(outputs))

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": answer.text}} if self.chat else {"text": answer.text}
        ending = {
            "logprobs": self._logprobs(answer.tokens, 0),
            "finish_reason": REASONS.get(answer.reason or "", "stop"),
        }
        return {"index": index} | content | ending

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if not tokens or tokens[0].logprob is None:
            return None
        texts = [self._text(token.id) for token in tokens]
        if self.chat:
            content = [
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*each) for each in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        places = [offset + sum(map(len, texts[:place])) for place in range(len(texts))]
        top = [{self._text(token): logprob for token, logprob in each.top} for each in tokens]
        values = [token.logprob for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": places}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(self._head(kind) | {"choices": choices} | more)


def usage(outputs: Sequence[Output]) -> dict[str, Any]:
    prompt = sum(len(output.prompt) for output in outputs)
    answered = sum(len(answer.tokens) for output in outputs for answer in output.answers)
    counts = {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}
    return counts | {"prompt_tokens_details": {"cached_tokens": sum(output.hit for output in outputs)}}


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
