"""What one step puts through the model: all its sequences' tokens in one flat row, read from and written to blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import PagedCache
from minillm.serve.sequence import Plan, Sequence


class ForwardPass:
    """The inputs of a step as they were when it was scheduled. starts, tables: per sequence of the plan.

    guesses: tokens to compute after a sequence's own, to be set before `logits`. After it: counts, tokens of each
    sequence in the pass; rows, logits of each whose last token is computed (1 and its guesses); hidden, [tokens,
    hidden_size] after the last block, if asked for.
    """

    def __init__(self, plan: Plan, cache: PagedCache, backend: Callable):
        self.plan, self.cache, self.backend = plan, cache, backend
        self.starts = [sequence.num_computed for sequence, _ in plan.batch]
        self.tables = [list(sequence.blocks) for sequence, _ in plan.batch]
        self.guesses: list[list[int]] = [[] for _ in plan.batch]
        self.hidden: Tensor | None = None

    def logits(self, model: Transformer, *, hidden: bool = False) -> Tensor:
        """[rows, vocab_size], float32 on the CPU, of the sequences whose last token this step computes."""
        flat, wanted, self.rows, self.counts = [], [], [], [tokens for _, tokens in self.plan.batch]
        for (sequence, tokens), start, guesses in zip(self.plan.batch, self.starts, self.guesses, strict=True):
            flat += sequence.tokens[start : start + tokens] + guesses
            if start + tokens >= sequence.num_tokens:
                self.rows.append(1 + len(guesses))
                wanted += range(len(flat) - self.rows[-1], len(flat))
        paged = self.cache.batch(self.tables, self.starts, self.counts, self.backend)
        device = paged.positions.device
        rows = torch.tensor(wanted, dtype=torch.int64, device=device)
        hook = model.blocks[-1].register_forward_hook(self._keep) if hidden else None
        try:
            y = model(torch.tensor([flat], device=device), paged.positions, attention=paged, rows=rows)
        finally:
            if hook is not None:
                hook.remove()
        return y[0].float().cpu()

    def table(self, sequence: Sequence) -> list[int]:
        """The blocks it had in this pass, whatever became of it since."""
        return next(table for (each, _), table in zip(self.plan.batch, self.tables, strict=True) if each is sequence)

    def _keep(self, block, inputs, output: Tensor) -> None:
        self.hidden = output[0]
