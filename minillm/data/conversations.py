"""Conversations to learn answers from: whole ones packed into windows, and only what the assistant said counts.

    a line of a .jsonl   {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

    window       <user> Hi <assistant> Hello! <end> <user> Why? <assistant> So. <end> <pad> ...
    counts                             ^^^^^^^^^^^                          ^^^^^^^^^
    document       0 0     0           0 0    0       1     1      1        1   1       2

The tokenizer's chat template says how a conversation is written, and where an answer begins is asked of it, too: what a
model is given to answer is the conversation up to there. A window holds as many conversations as fit (first fit); each
sees itself alone (`documents`). One that is longer than a window loses its end.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from minillm.data.dataset import IGNORE, TokenDataset
from minillm.data.tokenizer import Tokenizer

AnyLine = TypeVar("AnyLine")
HELD_OUT = 10  # every tenth conversation is for validation


@dataclass(frozen=True)
class Conversation:
    """ids: [tokens]; counts: [tokens] of bool, which of them the assistant said."""

    ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Conversations:
    """Takes the place of `Tokens` where answers are learnt. text_bytes: of all that was written, template included."""

    conversations: tuple[Conversation, ...] = field(repr=False)
    vocab_size: int
    separator: int
    text_bytes: int

    def __len__(self) -> int:
        return len(self.array)

    @cached_property
    def array(self) -> np.ndarray:
        """All ids, one conversation after the other."""
        return np.concatenate([each.ids for each in self.conversations])


def is_conversations(path: str | None) -> bool:
    """Whether data of that name are conversations: a .jsonl file."""
    return path is not None and path.endswith(".jsonl")


def read_conversations(path: str | Path, tokenizer: Tokenizer) -> tuple[Conversations, Conversations]:
    """(to train on, to validate on) of a .jsonl file. ValueError, naming the line, for one that is no conversation, has
    no answer or does not fit the template; and for a file of fewer than two."""
    found = read_lines(Path(path), lambda line: encode(messages_of(json.loads(line)), tokenizer), "conversations")
    held_out = found[HELD_OUT - 1 :: HELD_OUT] or found[-1:]
    kept = {id(each) for each in held_out}
    return tuple(together(part, tokenizer) for part in ([e for e in found if id(e) not in kept], held_out))


def read_lines(path: Path, read: Callable[[str], AnyLine], what: str) -> list[AnyLine]:
    """What `read` makes of each line that is not empty. ValueError, naming the line, if it raises one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON's strings may hold other ends of lines
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a .jsonl file of {what}.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(read(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if len(found) < 2:
        raise ValueError(f"{path} holds {len(found)} {what}: at least one to train on and one to validate on.")
    return found


def encode(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Conversation:
    """ValueError if there is no answer, or if the tokenizer's template cannot tell where it is (`chat_pieces`)."""
    pieces = tokenizer.chat_pieces(messages)
    counts = np.concatenate([np.full(len(ids), is_answer) for ids, is_answer in pieces])
    if not counts.any():
        raise ValueError("no message is the assistant's: there is no answer to learn.")
    return Conversation(np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in pieces]), counts)


class ConversationDataset(TokenDataset):
    """As `TokenDataset`, of windows that hold whole conversations. ValueError if no answer fits into a window."""

    def __init__(self, tokens: Conversations, seq_len: int, positions: np.ndarray | torch.Tensor | None = None) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} is too small: a window needs at least 1 input token")
        self.tokens, self.seq_len = tokens, seq_len
        self.positions = None if positions is None else np.asarray(positions, dtype=np.int64)
        size = seq_len + 1
        fitting = [each for each in tokens.conversations if each.counts[1:size].any()]
        if not fitting:
            raise ValueError(f"no answer begins within {size} tokens: use a longer seq_len")
        bins = _packed([min(size, len(each.ids)) for each in fitting], size)
        self._ids = np.full((len(bins), size), tokens.separator)
        self._counts = np.zeros((len(bins), size), dtype=bool)
        self._documents = np.zeros((len(bins), size), dtype=np.int64)
        for window, members in enumerate(bins):
            start = 0
            for number, member in enumerate(members):
                each = fitting[member]
                stop = min(size, start + len(each.ids))
                self._ids[window, start:stop] = each.ids[: stop - start]
                self._counts[window, start + 1 : stop] = each.counts[1 : stop - start]  # its first token has no context
                self._documents[window, start:stop] = number
                start = stop
            self._documents[window, start:] = len(members)
        self._padding = np.array([len(members) for members in bins])  # the number of the padding's document

    def __len__(self) -> int:
        return len(self._ids)

    @cached_property
    def crc32(self) -> int:
        return zlib.crc32(self._counts.tobytes(), zlib.crc32(self._ids.astype("<i8").tobytes()))

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        if (outside := wanted[(wanted < 0) | (wanted >= len(self))]).size:
            raise IndexError(f"window {outside[0]} is outside 0..{len(self) - 1}")
        ids, counts = self._ids[wanted], self._counts[wanted]
        inputs, targets = ids[:, :-1], np.where(counts[:, 1:], ids[:, 1:], IGNORE)
        if self.positions is not None:
            own = np.minimum(self.positions, self.seq_len - 1)
            inputs, targets = inputs[:, own], targets[:, own]
            targets[:, self.positions >= self.seq_len] = IGNORE
        return torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy())

    def documents(self, indices: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self._documents[np.asarray(indices, dtype=np.int64).reshape(-1), :-1].copy())

    @property
    def waste(self) -> float:
        """Share of the windows' places that is padding."""
        return float((self._documents == self._padding[:, None]).mean())


def _packed(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Which of them share a window: each goes into the first one that still has room."""
    bins: list[list[int]] = []
    left = np.full(len(sizes), room)  # a bin that is not there yet has room, and comes after those that are
    for member, size in enumerate(sizes):
        place = int((left[: len(bins) + 1] >= size).argmax())
        if place == len(bins):
            bins.append([])
        bins[place].append(member)
        left[place] -= size
    return bins


def messages_of(raw: Any, key: str = "messages") -> list[dict[str, Any]]:
    """Of a line's object. ValueError if it has none, or something else."""
    messages = raw.get(key) if isinstance(raw, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'it has no "{key}": a list of {{"role": ..., "content": ...}} is expected.')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(each), str) for each in ("role", "content")):
            raise ValueError(f'{message!r:.60} is no message: {{"role": ..., "content": ...}} is expected.')
    return messages


def together(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> Conversations:
    text_bytes = sum(len(tokenizer.decode(each.ids.tolist()).encode()) for each in conversations)
    return Conversations(tuple(conversations), tokenizer.vocab_size, tokenizer.eos_id, text_bytes)
