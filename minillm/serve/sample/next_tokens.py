"""After the forward pass: from logits to answers that have grown.

    logits ──▶ draw: who gets a token, sampled on the device ──▶ read ──▶ give: accepted; does it end the answer?
    with speculation: read ──▶ check: draft tokens against logits ───────▶ give

The host reads the device once in a step. What goes wrong here for one request, logits that are not finite or sampling
that raises, ends that request alone.
"""

import torch
from torch import Tensor

from minillm.serve.requests.params import SamplingParams, Token
from minillm.serve.requests.request import Sample
from minillm.serve.requests.table import RequestTable
from minillm.serve.run.model_runner import ForwardPass
from minillm.serve.sample.batch import NOT_FINITE, Row, SampledTokens, sample_on_device
from minillm.serve.sample.reference import RULED_OUT
from minillm.serve.schedule.sequence import Plan, Sequence

# A sequence whose last token was computed; its sample, None if that was cancelled during the pass; the first of its
# rows of the logits, and the end of them.
Ready = tuple[Sequence, Sample | None, int, int]
LIKELIEST: Row = (SamplingParams(), (), None)


class NextTokens:
    """Gives the sequences of a step their next tokens. Held by the engine, which takes its lock around `after`."""

    def __init__(self, unfinished: RequestTable):
        self.unfinished, self.scheduler, self.speculation = unfinished, unfinished.scheduler, unfinished.speculation

    def after(self, plan: Plan, run: ForwardPass, logits: Tensor) -> int:
        """The next tokens of the sequences whose last token was computed; returns how many were sampled."""
        if self.speculation is not None:
            ready = self._ready(plan, run, logits)
            return self.give(ready, self._checked(ready, logits) if ready else [], run)
        ready, sampled = self.sample(plan, run, logits)
        return 0 if sampled is None else self.give(ready, [token and [token] for token in sampled.read()], run)

    def sample(self, plan: Plan, run: ForwardPass, logits: Tensor) -> tuple[list[Ready], SampledTokens | None]:
        """Who gets a token, and the tokens, which nobody has read yet; None if no sequence was completed."""
        ready = self._ready(plan, run, logits)
        return self._draw(ready, run, logits) if ready else ([], None)

    def _draw(self, ready: list[Ready], run: ForwardPass, logits: Tensor) -> tuple[list[Ready], SampledTokens]:
        """A token for each; without those whose own sampling raised: their requests have ended."""
        places = [start for _, _, start, _ in ready]
        in_order = None if places == list(range(len(logits))) else places
        if all([taken is None or taken.request.params.greedy_only for _, taken, _, _ in ready]):
            return ready, sample_on_device(logits, [LIKELIEST] * len(ready), in_order, run.buffers.sampled)
        rows = [
            LIKELIEST if taken is None else (taken.request.params, sequence.tokens, taken.draw)
            for sequence, taken, _, _ in ready
        ]
        counts = [taken and taken.draw.count for _, taken, _, _ in ready]
        try:
            return ready, sample_on_device(logits, rows, in_order, run.buffers.sampled)
        except Exception:  # of one row or of several: alone, and with the same draws, it shows of which
            for (_, taken, start, _), row, count in zip(ready, rows, counts, strict=True):
                if taken is not None:
                    taken.draw.count = count
                    self._alone(taken, sample_on_device, logits, [row], [start], run.buffers.sampled)
                    taken.draw.count = count
            left = [each for each in ready if each[1] is None or each[1].answer.reason is None]
            if len(left) == len(ready):
                raise
        return self._draw(left, run, logits)

    def give(self, ready: list[Ready], tokens: list[list[Token] | None], run: ForwardPass) -> int:
        """Adds to each answer its tokens (None: its logits are not finite); returns how many were added."""
        for (sequence, taken, _, _), given in zip(ready, tokens, strict=True):
            if given is None:
                self.scheduler.pool.invalidate(run.table(sequence))
                if taken is not None and taken.answer.reason is None:
                    reason = f"its logits are not finite after {sequence.num_tokens} tokens (NaN or infinite)"
                    self.unfinished.end(taken.request, "failed", reason)
        sampled, ended = 0, []
        for (_, taken, _, _), given in zip(ready, tokens, strict=True):
            if given and taken is not None and taken.answer.reason is None:
                sampled += self._accept(taken, given)
                if taken.answer.reason is not None:
                    ended.append(taken.request)
        for request in ended:
            self.unfinished.close_if_done(request)
        return sampled

    def _ready(self, plan: Plan, run: ForwardPass, logits: Tensor) -> list[Ready]:
        """All that get a token, with the forks of those that have just completed their prompt."""
        complete = self.scheduler.advance(plan)
        ready, samples, end = [], self.unfinished.samples, 0
        for sequence, count in zip(complete, run.rows, strict=True):
            start, end = end, end + count
            taken = samples.get(sequence)
            ready.append((sequence, taken, start, end))
            if sequence.num_seqs > 1 and taken is not None:
                for fork in self.scheduler.fork(sequence):
                    ready.append((fork, self.unfinished.attach(taken.request, fork), start, end))
            if taken is not None and taken.request.params.first_tokens:
                self._restrict(taken, logits[start])
        return ready

    def _restrict(self, taken: Sample, logits: Tensor) -> None:
        """The first token of an answer is one of its request's `first_tokens`."""
        if len(taken.sequence.tokens) == len(taken.request.output.prompt):
            allowed = torch.full(logits.shape, RULED_OUT)
            allowed[list(taken.request.params.first_tokens)] = 0
            logits += allowed.to(logits.device, non_blocking=True)

    def _checked(self, ready: list[Ready], logits: Tensor) -> list[list[Token] | None]:
        """With speculation: the accepted draft tokens of each and one more. Nothing where a draft is no good."""
        if not all([taken is None or taken.request.params.greedy_only for _, taken, _, _ in ready]):
            logits = logits.cpu()  # drafts are checked there; for greedy ones the likeliest tokens say all
        most, likeliest = logits.max(-1)
        best = torch.where(most.isfinite(), likeliest, NOT_FINITE).tolist()
        found = []
        for sequence, taken, start, end in ready:
            if best[start] < 0 and (taken is None or end - start == 1):
                found.append(None)
            elif taken is None or taken.answer.reason is not None:  # cancelled; failed just now by another sample
                found.append([])
            elif best[start] < 0:  # a draft token may have spoilt it: 0 · nan is nan, also behind a mask
                self.speculation.drop(sequence)
                self.scheduler.commit_accepted(sequence)
                found.append([])
            else:
                usable = next((row for row in range(start, end) if best[row] < 0), end)
                rows = logits[start:usable], best[start:usable]
                found.append(self._alone(taken, self.speculation.check, taken, *rows) or [])
        return found

    def _alone(self, taken: Sample, sampling, *arguments):
        """sampling(*arguments); if it raises, the sample's request ends, and it alone."""
        try:
            return sampling(*arguments)
        except Exception as failure:
            reason = f"sampling its token {len(taken.answer.tokens) + 1} raised {type(failure).__name__}: {failure}"
            self.unfinished.end(taken.request, "failed", reason)

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
