"""No cache, no batch: every token puts the whole sequence through the model again, one request after the other.

pass 1   p p p p p                 A prompt of p tokens and an answer of n cost
pass 2   p p p p p 1               p + (p + 1) + … + (p + n - 1) = n·p + n·(n - 1)/2 tokens,
pass 3   p p p p p 1 2             instead of p + n - 1 with a cache of keys and values.
"""

import torch

from minillm.serve.fcfs import FirstCome, going


class Naive(FirstCome):
    """`Naive(model)`: what a decoder does that keeps nothing. See `FirstCome` for how it is used."""

    def compute(self) -> None:
        while self.waiting and not going(self.waiting[0]):
            self.waiting.popleft()
        if not self.waiting:
            return
        taken = self.waiting[0]
        tokens = taken.sequence.tokens
        last = torch.tensor([len(tokens) - 1], device=self.model.embedding.weight.device)
        logits = self.logits([taken], [tokens], [len(tokens)], rows=last)
        self.accept(taken, logits[0, 0])
