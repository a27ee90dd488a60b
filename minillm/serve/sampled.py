"""What a step has sampled, while it is still on the device, and the one time that the host reads it.

ids ────▶ may feed the next pass as they are (`async_scheduling.py`)
told ───▶ read: one copy to the host, with all that it wants to know of every row

greedy or sampled        [rows]                  the id; NOT_FINITE; UNCERTAIN
with log-probabilities   [rows, 2 + 2 · most]    the same, that of the token, the likeliest ids, theirs (as float64)
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from minillm.serve.sampling import SamplingParams, Token, described

NOT_FINITE, UNCERTAIN = -1, -2  # instead of an id: logits of NaN or infinity; the row has to be sorted


class SampledTokens:
    """ids: [rows], int64, a valid id in each. flags: the same, or what is to be told instead of an id.

    again: how to sample the rows told as UNCERTAIN. redone: those for which `read` had to, so that their token is not
    what `ids` says.
    """

    def __init__(self, ids: Tensor, flags: Tensor, again: Callable[[list[int]], Tensor] | None = None):
        self.ids, self.redone = ids, []
        self._told, self._again = flags, again
        self._wants: dict[int, tuple[SamplingParams, Tensor]] = {}  # row -> what it wants, its log-probabilities
        self._sent: torch.cuda.Event | None = None

    def describe(self, rows: Tensor, params: dict[int, SamplingParams], logits: Tensor) -> None:
        """Adds log-probabilities for the rows that want them. rows: the keys of params, on the device."""
        logprobs = torch.log_softmax(logits.index_select(0, rows), dim=-1)
        top = logprobs.topk(min(max(each.logprobs for each in params.values()), logits.shape[1]))
        own = logprobs.gather(1, self.ids[rows][:, None])
        columns = torch.cat((own.double(), top.indices.double(), top.values.double()), dim=1)
        told = columns.new_zeros(len(logits), 1 + columns.shape[1])
        told[:, 0] = self._told
        told[rows, 1:] = columns
        self._told = told
        self._wants = dict(zip(params, zip(params.values(), logprobs, strict=True), strict=True))

    def send(self) -> None:
        """Starts the copy that `read` waits for, so that nothing which is launched after it delays it."""
        if self._told.is_cuda:
            self._told = self._told.to("cpu", non_blocking=True)  # into pinned memory
            self._sent = torch.cuda.Event()
            self._sent.record()

    def read(self) -> list[Token | None]:
        """The tokens, None where logits are not finite. The host waits once, and again only if rows are UNCERTAIN."""
        if self._sent is not None:
            self._sent.synchronize()
        told = self._told.tolist()
        ids = [int(row[0]) for row in told] if self._wants else told
        if self._again is not None and UNCERTAIN in ids:
            self.redone = [row for row, token in enumerate(ids) if token == UNCERTAIN]
            for row, token in zip(self.redone, self._again(self.redone).tolist(), strict=True):
                ids[row] = token
        tokens = [plain_token(token) if token >= 0 else None for token in ids]
        for row, (params, logprobs) in self._wants.items():
            if row in self.redone:
                tokens[row] = described(ids[row], logprobs.cpu(), params)
            elif tokens[row] is not None:
                own, *top = told[row][1:]
                most = len(top) // 2
                likeliest = zip(map(int, top[:most]), top[most:], strict=True)
                tokens[row] = Token(ids[row], own, tuple(likeliest)[: params.logprobs])
        return tokens


@lru_cache(maxsize=1 << 16)
def plain_token(token: int) -> Token:
    """One object for all the times that a token is sampled: it never changes."""
    return Token(token)
