"""What the last stage has of a step and rank 0 needs, in a message or two.

    sampled        a token of each row, 8 bytes; with log-probabilities, 16 more for each of the likeliest tokens
    not sampled    logits, by which rank 0 verifies draft tokens; of rows that need only the largest, it and its token

Both sides know from the step what a reply holds. What sampling raised, which is rare, follows as a text.
"""

import json
from math import inf

import numpy as np
import torch
from torch import Tensor

from minillm.comm import Group
from minillm.serve.ranks.runner import whole_rows
from minillm.serve.requests.params import Token, plain_token
from minillm.serve.run.model_runner import StepOutputs
from minillm.serve.run.step_inputs import StepInputs

NO_TOKEN = -1.0  # in place of an id: logits are not finite


class ReadTokens:
    """In place of `SampledTokens`, where they were read by another rank."""

    def __init__(self, tokens: list[Token | None]) -> None:
        self.tokens, self.resampled = tokens, ()

    def read(self) -> list[Token | None]:
        return self.tokens


class Replies:
    """To rank 0 of a group on the CPU, from rank `source` of it: one for each step, in their order."""

    def __init__(self, group: Group, source: int, vocab_size: int) -> None:
        self.group, self.source, self.vocab_size = group, source, vocab_size

    def send(self, step: StepInputs, outputs: StepOutputs) -> None:
        """Waits until the device has computed the step."""
        sampled, whole = step.sampling is not None, whole_rows(step)
        rows = _rows_of(outputs.sampled.read(), self._most(step)) if sampled else _largest(outputs.logits[~whole])
        said = {row: (type(fault).__name__, str(fault)) for row, fault in outputs.faults.items()}
        text = json.dumps(said).encode() if said else b""
        self._send(torch.cat((torch.tensor([len(text)], dtype=torch.float64, device="cpu"), rows.flatten())))
        if not sampled and whole.any():
            self._send(outputs.logits[torch.from_numpy(whole)].cpu())
        if text:
            self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def receive(self, step: StepInputs, outputs: StepOutputs, device: torch.device) -> None:
        """Into the step's outputs on rank 0. device: where logits go."""
        whole = whole_rows(step)
        sizes = (int((~whole).sum()), 2) if step.sampling is None else (step.sampling.count, 1 + 2 * self._most(step))
        numbers = self._receive(1 + sizes[0] * sizes[1], torch.float64)
        rows = numbers[1:].view(sizes)
        if step.sampling is not None:
            outputs.sampled = ReadTokens(self._tokens(step, rows.tolist()))
        else:
            logits = torch.full((len(whole), self.vocab_size), -inf, device="cpu")
            if whole.any():
                logits[whole] = self._receive(int(whole.sum()) * self.vocab_size, torch.float32).view(
                    -1, self.vocab_size
                )
            logits[np.flatnonzero(~whole), rows[:, 0].long()] = rows[:, 1].float()
            outputs.logits = logits.to(device)
        if length := int(numbers[0]):
            said = json.loads(bytes(self._receive(length, torch.uint8).tolist()))
            outputs.faults = {int(row): type(name, (Exception,), {})(text) for row, (name, text) in said.items()}

    def _most(self, step: StepInputs) -> int:
        """1 + how many of the likeliest tokens are told of each row; 0 if no row wants log-probabilities."""
        wanted = step.sampling.logprobs
        return 0 if wanted is None or wanted.max() < 0 else 1 + min(int(wanted.max()), self.vocab_size)

    def _tokens(self, step: StepInputs, rows: list[list[float]]) -> list[Token | None]:
        tokens: list[Token | None] = []
        for number, (token, *more) in enumerate(rows):
            wanted = int(step.sampling.logprobs[number]) if more else -1
            if token == NO_TOKEN:
                tokens.append(None)
            elif wanted < 0:
                tokens.append(plain_token(int(token)))
            else:
                (_, own), *top = zip(map(int, more[::2]), more[1::2], strict=True)
                tokens.append(Token(int(token), own, tuple(top[:wanted])))
        return tokens

    def _send(self, x: Tensor) -> None:
        self.group.exchange(send=(x, 0), eager=True)

    def _receive(self, count: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(count, dtype=dtype, device="cpu")
        self.group.exchange(recv=(x, self.source), eager=True)
        return x


def _rows_of(tokens: list[Token | None], most: int) -> Tensor:
    """[tokens, 1 + 2 · most]: the id, then pairs of an id and its log-probability, its own first."""
    rows = torch.zeros(len(tokens), 1 + 2 * most, dtype=torch.float64, device="cpu")
    for row, token in zip(rows, tokens, strict=True):
        row[0] = NO_TOKEN if token is None else token.id
        if token is not None and token.logprob is not None:
            told = [(token.id, token.logprob), *token.top]
            pairs = torch.tensor(told, dtype=torch.float64, device="cpu").flatten()
            row[1 : 1 + len(pairs)] = pairs
    return rows


def _largest(logits: Tensor) -> Tensor:
    """[rows, vocab_size] -> [rows, 2]: the likeliest token and its logit."""
    value, index = logits.max(-1)
    return torch.stack((index.double(), value.double()), dim=-1).cpu()
