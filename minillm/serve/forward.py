"""What one step puts through the model: all its sequences' tokens in one flat row, read from and written to blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import PagedCache
from minillm.serve.sequence import Plan


class ForwardPass:
    """The inputs of a step as they were when it was scheduled. starts, tables: per sequence of the plan."""

    def __init__(self, plan: Plan, cache: PagedCache, backend: Callable):
        sequences, counts = zip(*plan.batch, strict=True)
        self.starts = [sequence.num_computed for sequence in sequences]
        self.tables = [list(sequence.blocks) for sequence in sequences]
        self.paged = cache.batch(self.tables, self.starts, counts, backend)
        device = self.paged.positions.device
        spans = zip(sequences, self.starts, counts, strict=True)
        self.tokens = torch.tensor([[t for s, at, n in spans for t in s.tokens[at : at + n]]], device=device)
        ready = [index for index, (sequence, n) in enumerate(plan.batch) if sequence.lacking == n]
        self.rows = self.paged.last_rows[torch.tensor(ready, dtype=torch.int64, device=device)]

    def logits(self, model: Transformer) -> Tensor:
        """[sequences, vocab_size], float32 on the CPU, of the sequences whose last token this step computes."""
        y = model(self.tokens, self.paged.positions, attention=self.paged, rows=self.rows)
        return y[0].float().cpu()
