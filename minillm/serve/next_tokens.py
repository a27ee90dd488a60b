"""After the forward pass: from logits to answers that have grown.

    logits ──▶ ready: which samples get a token ──▶ choose: sampled, or draft tokens checked ──▶ accept: does it end?

What goes wrong here for one request, logits that are not finite or sampling that raises, ends that request alone.
"""

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

from minillm.serve.model_runner import ForwardPass
from minillm.serve.request import Sample
from minillm.serve.sampler import sample_batch
from minillm.serve.sampling import RULED_OUT, Token
from minillm.serve.sequence import Plan, Sequence
from minillm.serve.unfinished import Unfinished


class NextTokens:
    """Gives the sequences of a step their next tokens. Held by the engine, which takes its lock around `after`."""

    def __init__(self, unfinished: Unfinished):
        self.unfinished, self.scheduler, self.speculation = unfinished, unfinished.scheduler, unfinished.speculation

    def after(self, plan: Plan, run: ForwardPass, logits: Tensor) -> int:
        """The next tokens of the sequences whose last token was computed; returns how many were sampled."""
        complete = self.scheduler.advance(plan)
        if not complete:
            return 0
        most, likeliest = logits.max(-1)
        ready = self._ready(complete, run, list(map(isfinite, most.tolist())))
        for taken, rows in ready:
            if taken.request.params.first_tokens and not taken.answer.tokens:
                allowed = torch.full_like(logits[rows.start], RULED_OUT)
                allowed[list(taken.request.params.first_tokens)] = 0
                logits[rows.start] += allowed
                likeliest[rows.start] = logits[rows.start].argmax()
        chosen = self._choose(ready, logits, likeliest)
        sampled = sum(self._accept(taken, tokens) for (taken, _), tokens in zip(ready, chosen, strict=True))
        for taken, _ in ready:
            if taken.answer.reason is not None:
                self.unfinished.close_if_done(taken.request)
        return sampled

    def _ready(self, complete: list[Sequence], run: ForwardPass, sound: list[bool]) -> list[tuple[Sample, slice]]:
        """(sample, its rows of the logits) of all that get a token: without those that were cancelled during the pass
        or whose logits are not finite, and with the forks of those that have just completed their prompt."""
        ready, end = [], 0
        for sequence, count in zip(complete, run.rows, strict=True):
            start, end = end, end + count
            taken = self.unfinished.samples.get(sequence)
            if taken is None:  # cancelled meanwhile, or failed by another sample of its request
                self.scheduler.pool.invalidate(() if sound[start] else run.table(sequence))
            elif sound[start]:
                family = [taken]
                if sequence.num_seqs > 1:
                    family += [self.unfinished.attach(taken.request, fork) for fork in self.scheduler.fork(sequence)]
                usable = end if count == 1 else next((row for row in range(start, end) if not sound[row]), end)
                ready += [(each, slice(start, usable)) for each in family]
            elif count > 1:  # a draft token may have spoilt it: 0 · nan is nan, also behind a mask
                self.speculation.drop(sequence)
                self.scheduler.commit_accepted(sequence)
            else:
                reason = f"its logits are not finite after {sequence.num_tokens} tokens (NaN or infinite)"
                self.unfinished.end(taken.request, "failed", reason)
        return [(taken, rows) for taken, rows in ready if taken.answer.reason is None]

    def _choose(self, ready: list[tuple[Sample, slice]], logits: Tensor, likeliest: Tensor) -> list[list[Token]]:
        """The next tokens of each sample: one, or with speculation the accepted draft tokens and one more.

        Nothing for a sample whose own sampling raised; its request ends.
        """
        if self.speculation is not None:
            logits, ids = logits.cpu(), likeliest.tolist()
            return [self._alone(taken, self.speculation.check, taken, logits[rows], ids[rows]) for taken, rows in ready]
        places = [rows.start for _, rows in ready]
        if places != list(range(len(logits))):
            logits, likeliest = logits[places], likeliest[places]
        rows = [(taken.request.params, taken.sequence.tokens, taken.draw) for taken, _ in ready]
        counts = [taken.draw.count for taken, _ in ready]
        try:
            return [[token] for token in sample_batch(logits, rows, likeliest)] if rows else []
        except Exception:  # of one row or of several: one by one, and with the same draws, it shows of which
            chosen = []
            for index, (taken, _) in enumerate(ready):
                taken.draw.count = counts[index]
                chosen.append(self._alone(taken, sample_batch, logits[index : index + 1], rows[index : index + 1]))
            return chosen

    def _alone(self, taken: Sample, choose: Callable[..., list[Token]], *arguments) -> list[Token]:
        """choose(*arguments); if it raises, the sample's request ends, and it alone."""
        try:
            return choose(*arguments)
        except Exception as failure:
            reason = f"sampling its token {len(taken.answer.tokens) + 1} raised {type(failure).__name__}: {failure}"
            self.unfinished.end(taken.request, "failed", reason)
            return []

    def _accept(self, taken: Sample, tokens: list[Token]) -> int:
        """Adds tokens to the answer until one ends it; returns how many."""
        if taken.answer.reason is not None:  # its request failed in sampling
            return 0
        output = taken.request.output
        output.passes += bool(taken.answer.tokens)
        if output.timing.first_token is None:
            output.timing.first_token = self.unfinished.clock()
        given, reason = 0, None
        try:
            while reason is None and given < len(tokens):
                reason, given = taken.accept(tokens[given]), given + 1
        except Exception as failure:  # of the tokenizer: this request's own
            self.unfinished.end(taken.request, "failed", f"{type(failure).__name__}: {failure}")
            return given
        self.scheduler.commit_accepted(taken.sequence)
        if reason is not None:
            self.unfinished.finish(taken, reason)
        elif self.speculation is not None:
            self.speculation.want(taken.sequence)
        return given
