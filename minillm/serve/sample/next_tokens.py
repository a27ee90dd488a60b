"""After the forward pass: from what was sampled to answers that have grown.

    advance   what the pass computed counts; forks of prompts that have just been completed
    finish    read the tokens (with speculation: `Speculation.verify`) ──▶ give: accepted; does one end its answer?

The host reads the device once in a step. What goes wrong here for one request, logits that are not finite or sampling
that raises, ends that request alone.
"""

from minillm.serve.requests.params import Token
from minillm.serve.requests.request import Sample
from minillm.serve.requests.table import RequestTable
from minillm.serve.run.step import Ready, Step
from minillm.serve.schedule.drafts import commit_accepted


class NextTokens:
    """Gives the sequences of a step their next tokens. Held by the engine's core."""

    def __init__(self, requests: RequestTable):
        self.requests, self.scheduler, self.speculation = requests, requests.scheduler, requests.speculation

    def advance(self, step: Step) -> None:
        """The step's tokens are computed. A request whose sampling raised ends, and no other."""
        self.scheduler.advance(step.plan)
        if step.forks:
            step.ready = [row for each in step.ready for row in self._with_forks(each)]
        for row, failure in step.outputs.faults.items():
            self.failed(step.ready[row][0], failure)

    def finish(self, step: Step) -> int:
        """Adds the step's tokens to the answers; returns how many were added."""
        if not step.ready:
            return 0
        if self.speculation is None:
            return self._give(step, [token and [token] for token in step.outputs.sampled.read()])
        tokens, faults = self.speculation.verify(step)
        for sample, failure in faults:
            self.failed(sample, failure)
        return self._give(step, tokens)

    def _with_forks(self, ready: Ready) -> list[Ready]:
        """The sample; if it is the first of several, they all, which run from here on."""
        sample, place, start, end = ready
        if sample.num_seqs == 1:
            return [ready]
        samples = sample.request.samples
        if sample.reason is None:  # it was not cancelled during the pass
            self.scheduler.fork(sample, samples[1:])
        return [(each, place, start, end) for each in samples]

    def _give(self, step: Step, tokens: list[list[Token] | None]) -> int:
        """Adds to each answer its tokens; returns how many were added.

        tokens: None for logits that are not finite, none if only a draft token made them so.
        """
        for row in [row for row, given in enumerate(tokens) if given is None and row not in step.dropped]:
            sample, place, _, _ = step.ready[row]
            step.invalidate(self.scheduler.pool, place)
            if sample.reason is None:
                reason = f"its logits are not finite after {sample.num_tokens} tokens (NaN or infinite)"
                self.requests.end(sample.request, "failed", reason)
        sampled = 0
        for row, ((sample, place, _, _), given) in enumerate(zip(step.ready, tokens, strict=True)):
            if sample.reason is not None or row in step.dropped:
                continue
            if given:
                sampled += self._accept(sample, given)
            else:  # its draft spoilt the pass
                self.scheduler.take_back(sample, step.starts[place])
        return sampled

    def failed(self, sample: Sample, failure: Exception) -> None:
        """Sampling raised for this sample, so its request ends."""
        what = f"sampling its token {len(sample.answer()) + 1}"
        self.requests.end(sample.request, "failed", f"{what} raised {type(failure).__name__}: {failure}")

    def _accept(self, sample: Sample, tokens: list[Token]) -> int:
        """Adds tokens to the answer until one ends it; returns how many."""
        if sample.request.first_token is None:
            sample.request.first_token = self.requests.clock()
        sample.passes += 1
        given, reason = 0, None
        try:
            for token in tokens:
                given += 1
                if (reason := sample.accept(token)) is not None:
                    break
        except Exception as failure:  # of the tokenizer: this request's own
            self.requests.end(sample.request, "failed", f"{type(failure).__name__}: {failure}")
            return given
        if self.speculation is not None:
            commit_accepted(sample, self.scheduler.held)
            if reason is None:
                self.speculation.request_draft(sample)
        if reason is not None:
            self.requests.finish(sample, reason)
        return given
