"""Timer-based batching: a static batch starts when it is full, or when its oldest request has waited long enough.

arrivals   a   b       c                      d  e f g
             ├─ wait_s ─┤                     ├────┤ full (batch_size 4)
batches                  [a b c]                    [d e f g]

With a free engine a request is done after at most wait_s plus the time of its batch; who finds the engine busy waits
for the rest of the running batch, too. A longer timer fills batches (more tokens per pass) and delays the first token.
What serving systems for classifiers do (Crankshaw et al. 2017, Clipper, §4.3); answers of unequal length make it lose.
"""

from itertools import islice

from minillm.model import Transformer
from minillm.serve.fcfs import going
from minillm.serve.request import Sample
from minillm.serve.static import StaticBatches
from minillm.serve.trace import EARLY_S


class AdaptiveBatches(StaticBatches):
    """`AdaptiveBatches(model, batch_size=16, wait_s=0.05)`. options: see `FirstCome`."""

    def __init__(self, model: Transformer, batch_size: int, wait_s: float, **options):
        super().__init__(model, batch_size, **options)
        if not wait_s >= 0:
            raise ValueError(f"wait_s {wait_s} must be at least 0 seconds.")
        self.wait_s = wait_s

    @property
    def starts_at(self) -> float | None:
        waiting = list(islice(filter(going, self.waiting), self.batch_size))
        if any(map(going, self.batch)) or not waiting or len(waiting) == self.batch_size:
            return None
        due = waiting[0].request.output.timing.arrived + self.wait_s
        return due if due - self.clock() > EARLY_S else None

    def next_batch(self) -> list[Sample]:
        return super().next_batch() if self.starts_at is None else []
