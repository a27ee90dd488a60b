"""Pairs of answers to one prompt, of which one is preferred: what direct preference optimization learns from.

    a line of a .jsonl   {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": "4.", "rejected": "22."}

    rows of pair i       2i      <user> 2 + 2? <assistant> 4.  <end> <pad>
                         2i + 1  <user> 2 + 2? <assistant> 22. <end> <pad>

Answers alone count, as in conversations, and of a prompt with answers in it only what follows the prompt. A pair must
fit into its window whole: half an answer is not what was judged.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillm.data.conversations import (
    HELD_OUT,
    Conversation,
    ConversationDataset,
    Conversations,
    encode,
    messages_of,
    read_lines,
    together,
)
from minillm.data.dataset import IGNORE, TokenDataset
from minillm.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Preferences:
    """pairs: (chosen, rejected) answers, each with its prompt. all: the same as conversations."""

    pairs: tuple[tuple[Conversation, Conversation], ...] = field(repr=False)
    all: Conversations = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return self.all.vocab_size

    @property
    def text_bytes(self) -> int:
        return self.all.text_bytes

    @property
    def array(self) -> np.ndarray:
        return self.all.array

    def __len__(self) -> int:
        return len(self.all)


def read_preferences(path: str | Path, tokenizer: Tokenizer) -> tuple[Preferences, Conversations]:
    """(to train on, the chosen answers of held-out pairs) of a .jsonl file. ValueError, naming the line, for one that
    is no pair, and for a file of fewer than two."""
    path = Path(path)
    found = read_lines(path, lambda line: _pair(line, tokenizer), "pairs")
    held_out = found[HELD_OUT - 1 :: HELD_OUT] or found[-1:]
    kept = {id(pair) for pair in held_out}
    pairs = tuple(pair for pair in found if id(pair) not in kept)
    return (
        Preferences(pairs, together([each for pair in pairs for each in pair], tokenizer)),
        together([chosen for chosen, _ in held_out], tokenizer),
    )


class PreferenceDataset(TokenDataset):
    """Windows of pairs: `batch` of n indices has 2n rows. ValueError for a pair that is longer than its window."""

    def __init__(self, tokens: Preferences, seq_len: int) -> None:
        self.tokens, self.seq_len, self.positions = tokens, seq_len, None
        size = seq_len + 1
        rows = [each for pair in tokens.pairs for each in pair]
        if longest := max((len(each.ids) for each in rows if len(each.ids) > size), default=None):
            raise ValueError(f"a pair's answer ends after {longest} tokens, a window has {size}: use a longer seq_len")
        self._inputs = np.full((len(rows), seq_len), tokens.all.separator)
        self._targets = np.full((len(rows), seq_len), IGNORE)
        for row, each in enumerate(rows):
            count = len(each.ids) - 1
            self._inputs[row, :count] = each.ids[:-1]
            self._targets[row, :count] = np.where(each.counts[1:], each.ids[1:], IGNORE)

    def __len__(self) -> int:
        return len(self._inputs) // 2

    @cached_property
    def crc32(self) -> int:
        return zlib.crc32(self._targets.astype("<i8").tobytes(), zlib.crc32(self._inputs.astype("<i8").tobytes()))

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), each int64 [2 · len(indices), seq_len]: chosen and rejected in turn."""
        rows = (2 * np.asarray(indices, dtype=np.int64).reshape(-1, 1) + np.arange(2)).reshape(-1)
        return torch.from_numpy(self._inputs[rows]), torch.from_numpy(self._targets[rows])


def _pair(line: str, tokenizer: Tokenizer) -> tuple[Conversation, Conversation]:
    raw = json.loads(line)
    prompt = messages_of(raw, "prompt")
    return _answered(raw, prompt, "chosen", tokenizer), _answered(raw, prompt, "rejected", tokenizer)


def _answered(raw: dict[str, Any], prompt: list[dict[str, Any]], key: str, tokenizer: Tokenizer) -> Conversation:
    answer = raw.get(key)
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):  # as a message of its own
        answer = answer[0].get("content") if answer[0].get("role") == "assistant" else answer
    if not isinstance(answer, str) or not answer:
        raise ValueError(f'its "{key}" is {answer!r:.40}: an answer of the assistant is expected.')
    whole = encode([*prompt, {"role": "assistant", "content": answer}], tokenizer)
    starts = np.flatnonzero(whole.counts & ~np.concatenate([[False], whole.counts[:-1]]))
    return Conversation(whole.ids, whole.counts & (np.arange(len(whole.ids)) >= starts[-1]))  # the last answer alone


def dataset_of(tokens: Any, seq_len: int, positions: Any = None) -> TokenDataset:
    """The windows of a text, of conversations or of pairs."""
    if isinstance(tokens, Preferences):
        return PreferenceDataset(tokens, seq_len)
    kind = ConversationDataset if isinstance(tokens, Conversations) else TokenDataset
    return kind(tokens, seq_len, positions)
