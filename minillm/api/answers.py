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
REASONS = ("stop", "length")  # of a sample that ended as it should
LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's API uses this number, too


class TextOffsets:
    """Where in an answer each of its tokens begins, in characters; a token within a character begins with that."""

    def __init__(self, tokenizer: Tokenizer):
        self._push, self._characters = tokenizer.stream(), 0

    def of(self, tokens: Sequence[Token]) -> list[int]:
        """tokens: those that follow the ones it was last asked for."""
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(self._push(token.id))
        return offsets


@dataclass(frozen=True)
class Shape:
    """One kind of answer. chat: messages instead of texts. counts_usage: the last chunk of a stream has it."""

    model: str
    tokenizer: Tokenizer
    chat: bool
    counts_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, model: str, tokenizer: Tokenizer, chat: bool, counts_usage: bool) -> "Shape":
        return cls(model, tokenizer, chat, counts_usage, ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12))

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """outputs: one for each prompt; choices are numbered through all of their samples."""
        answers = [answer for output in outputs for answer in output.answers]
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return self._head(kind) | {"choices": choices, "usage": usage(outputs)}

    def first(self, index: int) -> bytes:
        """A chat's stream begins by saying who speaks."""
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def piece(self, index: int, text: str, tokens: Sequence[Token], offsets: TextOffsets) -> bytes:
        """offsets: of this sample; the text of a piece may lag behind its tokens."""
        logprobs = self._logprobs(tokens, offsets)
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._chunk([{"index": index} | content | {"logprobs": logprobs, "finish_reason": None}])

    def last(self, index: int, reason: str | None) -> bytes:
        content = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk([{"index": index} | content | {"logprobs": None, "finish_reason": reason}])

    def counted(self, outputs: Sequence[Output]) -> bytes:
        return self._chunk([], usage=usage(outputs))

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": answer.text}} if self.chat else {"text": answer.text}
        ending = {
            "logprobs": self._logprobs(answer.tokens, TextOffsets(self.tokenizer)),
            "finish_reason": answer.reason,
        }
        return {"index": index} | content | ending

    def _logprobs(self, tokens: Sequence[Token], offsets: TextOffsets) -> dict[str, Any] | None:
        if not tokens or tokens[0].logprob is None:
            return None
        if self.chat:
            content = [
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*each) for each in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        texts = [self._name(token.id) for token in tokens]
        top = [{self._name(token): _finite(logprob) for token, logprob in each.top} for each in tokens]
        values = [_finite(token.logprob) for token in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets.of(tokens)}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        content = self._bytes(token)
        return {"token": content.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(content)}

    def _name(self, token: int) -> str:
        """The token's text; of a part of a character its bytes, as OpenAI's API writes them, so that names differ."""
        content = self._bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _bytes(self, token: int) -> bytes:
        try:
            return self.tokenizer.decode_bytes([token])
        except ValueError:  # the model's vocabulary is padded beyond the tokenizer's
            return b""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        empty = {"usage": None} if self.counts_usage else {}
        return event(self._head(kind) | {"choices": choices} | empty | more)


def usage(outputs: Sequence[Output]) -> dict[str, Any]:
    prompt = sum(len(output.prompt) for output in outputs)
    answered = sum(len(answer.tokens) for output in outputs for answer in output.answers)
    counts = {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}
    return counts | {"prompt_tokens_details": {"cached_tokens": sum(output.hit for output in outputs)}}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event, in ASCII: some clients take U+0085 and U+2028 for the end of a line."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
