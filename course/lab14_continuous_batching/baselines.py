"""How requests were batched before continuous batching: in static batches, and in batches that a timer starts.

Each is used as `minillm.serve.LLM` is (`add`, `step`, `generate`), so that one trace goes through all of them.
"""

from itertools import islice

import torch
from torch import Tensor

from course.lab14_continuous_batching.fcfs import FirstCome, is_running
from minillm.bench.load import EARLY_S
from minillm.model import ModelConfig, Transformer
from minillm.model.attention import sdpa
from minillm.serve.requests.request import Sample


class StaticBatches(FirstCome):
    """Static batching: a batch starts together, is padded to its longest, and runs until its longest is done.

    row 0   p p p p p p 1 2 3 4 5 6 7 8        p prompt   · padding   1 2 … answer   x ended but still computed
    row 1   p p · · · · 1 2 x x x x x x        Later arrivals wait; · and x are thrown away (`waste`).
    row 2   p p p p · · 1 2 3 4 x x x x

    Prompts are padded on the right: a token's slot in the cache is its position, so causality alone hides the padding
    (it lies to the right of every token that is read) and an answer overwrites it before any query may see it. Exact,
    without a second mask. What engines did before Orca (Yu et al. 2022, §3, challenge C1).

    `StaticBatches(model, batch_size=16)`. A batch takes whoever waits when the last one is done, at most batch_size.

    options: see `FirstCome`, whose `waste` counts padding and the tokens of rows that had ended.
    """

    def __init__(self, model: Transformer, batch_size: int, **options):
        super().__init__(model, **options)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size {batch_size!r} must be a whole number of at least 1.")
        self.batch_size, self.batch, self.cache = batch_size, [], None

    def compute(self) -> None:
        if any(map(is_running, self.batch)):
            self.decode()
        elif batch := self.next_batch():
            self.prefill(batch)

    def next_batch(self) -> list[Sample]:
        batch: list[Sample] = []
        while self.waiting and len(batch) < self.batch_size:
            if is_running(sample := self.waiting.popleft()):
                batch.append(sample)
        return batch

    def prefill(self, batch: list[Sample]) -> None:
        """All prompts in one pass, and the first token of each answer."""
        lengths = [sample.num_tokens for sample in batch]
        weight, longest = self.model.embedding.weight, max(lengths)
        slots = max(sample.limit for sample in batch)
        self.batch = batch
        self.cache = PaddedCache(self.model.config, len(batch), slots, device=weight.device, dtype=weight.dtype)
        tokens = [sample.tokens + [0] * (longest - n) for sample, n in zip(batch, lengths, strict=True)]
        positions = torch.arange(longest, device=weight.device).expand(len(batch), -1)
        ends = sorted(set(lengths))
        rows = torch.tensor(ends, device=weight.device) - 1
        logits = self.logits(batch, tokens, lengths, positions=positions, attention=self.cache, rows=rows)
        for row, sample in enumerate(batch):
            self.accept(sample, logits[row, ends.index(lengths[row])])

    def decode(self) -> None:
        """Each row's last token: one more for those that go on; a row that has ended computes its last one again."""
        tokens = [sample.tokens[-1:] for sample in self.batch]
        places = [[sample.num_tokens - 1] for sample in self.batch]
        positions = torch.tensor(places, device=self.model.embedding.weight.device)
        useful = [int(is_running(sample)) for sample in self.batch]
        logits = self.logits(self.batch, tokens, useful, positions=positions, attention=self.cache)
        for row, sample in enumerate(self.batch):
            self.accept(sample, logits[row, 0])


class PaddedCache:
    """Keys and values of a batch, `slots` for each row, taken at once: an `AttentionFunction`. Slot = position."""

    def __init__(self, config: ModelConfig, rows: int, slots: int, *, device=None, dtype: torch.dtype | None = None):
        shape = (2, config.num_layers, rows, config.num_kv_heads, slots, config.head_dim)
        self.pool = torch.zeros(shape, device=device, dtype=dtype)  # zeros: a weight of 0 times nan were nan

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor, window: int | None) -> Tensor:
        """q, k, v: [rows, heads, tokens, head_dim]; positions: [rows, tokens]."""
        keys, values = self.pool[:, layer]
        row = torch.arange(len(q), device=q.device)[:, None]
        keys[row, :, positions], values[row, :, positions] = k.transpose(1, 2), v.transpose(1, 2)
        end = int(positions.max()) + 1
        where = torch.arange(end, device=q.device)
        options = {"layer": layer, "positions": positions, "window": window, "key_positions": where}
        return sdpa(q, keys[:, :, :end], values[:, :, :end], **options)


class TimerBatches(StaticBatches):
    """Timer-based batching: a static batch starts when it is full, or when its oldest request has waited long enough.

    arrivals   a   b       c                      d  e f g
                 ├─ wait_s ─┤                     ├────┤ full (batch_size 4)
    batches                  [a b c]                    [d e f g]

    With a free engine a request is done after at most wait_s plus the time of its batch; one that finds the engine busy
    also waits for the rest of the running batch. A longer timer fills batches (more tokens per pass) and delays the
    first token. Serving systems for classifiers do this (Crankshaw et al. 2017, Clipper, §4.3); answers of unequal
    length make it lose.

    `TimerBatches(model, batch_size=16, wait_s=0.05)`. options: see `FirstCome`.
    """

    def __init__(self, model: Transformer, batch_size: int, wait_s: float, **options):
        super().__init__(model, batch_size, **options)
        if not wait_s >= 0:
            raise ValueError(f"wait_s {wait_s} must be at least 0 seconds.")
        self.wait_s = wait_s

    @property
    def starts_at(self) -> float | None:
        waiting = list(islice(filter(is_running, self.waiting), self.batch_size))
        if any(map(is_running, self.batch)) or not waiting or len(waiting) == self.batch_size:
            return None
        due = waiting[0].request.arrived + self.wait_s
        return due if due - self.clock() > EARLY_S else None

    def next_batch(self) -> list[Sample]:
        return super().next_batch() if self.starts_at is None else []
