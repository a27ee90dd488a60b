"""After the forward pass: from logits to answers that have grown.

    logits ──▶ ready: which samples get a token ──▶ choose: sampled, or draft tokens checked ──▶ accept: does it end?

What goes wrong here for one request, logits that are not finite or sampling that raises, ends that request alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.serve.model_runner import ForwardPass
from minillm.serve.request import Sample
from minillm.serve.sampler import plain_token, sample_batch
from minillm.serve.sampling import RULED_OUT, Token
from minillm.serve.sequence import Plan, Sequence
from minillm.serve.unfinished import Unfinished

Ready = tuple[Sample, int, int]  # a sample that gets its next tokens; the first of its rows of the logits, and the end


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
        best = torch.where(most.isfinite(), likeliest, -1).tolist()  # all that a greedy step reads back
        ready = self._ready(complete, run, [token >= 0 for token in best])
        for taken, start, _ in ready:
            if taken.passes == 0 and taken.request.params.first_tokens:
                allowed = torch.full_like(logits[start], RULED_OUT)
                allowed[list(taken.request.params.first_tokens)] = 0
                logits[start] += allowed
                likeliest[start] = logits[start].argmax()
                best[start] = int(likeliest[start])
        sampled, ended = 0, []
        for (taken, _, _), tokens in zip(ready, self._choose(ready, logits, likeliest, best), strict=True):
            if taken.answer.reason is None:  # else its request failed in sampling
                sampled += self._accept(taken, tokens)
            if taken.answer.reason is not None:
                ended.append(taken.request)
        for request in ended:
            self.unfinished.close_if_done(request)
        return sampled

    def _ready(self, complete: list[Sequence], run: ForwardPass, sound: list[bool]) -> list[Ready]:
        """All that get a token: without those that were cancelled during the pass or whose logits are not finite, and
        with the forks of those that have just completed their prompt."""
        ready, samples, end = [], self.unfinished.samples, 0
        for sequence, count in zip(complete, run.rows, strict=True):
            start, end = end, end + count
            taken = samples.get(sequence)
            if taken is None:  # cancelled meanwhile, or failed by another sample of its request
                self.scheduler.pool.invalidate(() if sound[start] else run.table(sequence))
            elif sound[start]:
                usable = end if count == 1 else next((row for row in range(start, end) if not sound[row]), end)
                ready.append((taken, start, usable))
                if sequence.num_seqs > 1:
                    for fork in self.scheduler.fork(sequence):
                        ready.append((self.unfinished.attach(taken.request, fork), start, usable))
            elif count > 1:  # a draft token may have spoilt it: 0 · nan is nan, also behind a mask
                self.speculation.drop(sequence)
                self.scheduler.commit_accepted(sequence)
            else:
                reason = f"its logits are not finite after {sequence.num_tokens} tokens (NaN or infinite)"
                self.unfinished.end(taken.request, "failed", reason)
        return [each for each in ready if each[0].answer.reason is None]

    def _choose(self, ready: list[Ready], logits: Tensor, likeliest: Tensor, best: list[int]) -> list[list[Token]]:
        """The next tokens of each sample: one, or with speculation the accepted draft tokens and one more.

        best: likeliest, on the host. Nothing for a sample whose own sampling raised; its request ends.
        """
        plain = all([taken.request.params.plain for taken, _, _ in ready])
        if self.speculation is not None:
            logits, check = logits if plain else logits.cpu(), self.speculation.check
            return [self._alone(taken, check, taken, logits[i:end], best[i:end]) for taken, i, end in ready]
        if plain:
            return [[plain_token(best[start])] for _, start, _ in ready]
        places = [start for _, start, _ in ready]
        if places != list(range(len(logits))):
            logits, likeliest = logits[places], likeliest[places]
        rows = [(taken.request.params, taken.sequence.tokens, taken.draw) for taken, _, _ in ready]
        counts = [draw.count for _, _, draw in rows]
        try:
            return [[token] for token in sample_batch(logits, rows, likeliest)]
        except Exception:  # of one row or of several: one by one, and with the same draws, it shows of which
            chosen = []
            for index, (taken, _, _) in enumerate(ready):
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
        if taken.passes == 0 and taken.request.output.timing.first_token is None:
            taken.request.output.timing.first_token = self.unfinished.clock()
        taken.passes += 1
        given, reason = 0, None
        try:
            for token in tokens:
                given += 1
                if (reason := taken.accept(token)) is not None:
                    break
        except Exception as failure:  # of the tokenizer: this request's own
            self.unfinished.end(taken.request, "failed", f"{type(failure).__name__}: {failure}")
            return given
        if self.speculation is not None:
            self.scheduler.commit_accepted(taken.sequence)
            if reason is None:
                self.speculation.want(taken.sequence)
        if reason is not None:
            self.unfinished.finish(taken, reason)
        return given
