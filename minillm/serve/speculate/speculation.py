"""The engine's side of speculation: which sequences get drafts, which draft tokens a pass checks, what comes of them.

    schedule ──▶ draft (the proposer) ──▶ one pass of the target over last token + draft tokens ──▶ check
                  draft tokens are no tokens of their sequence until they are checked: preemption has nothing to undo

A draft is drawn at its full length whatever the step has room for, and what a pass cannot check the next one does; a
preempted sequence keeps its draft and its proposer's state. So a request's draws and its answer do not depend on what
else runs. (Greedy answers never do, so no more is drafted than can be checked.) A proposer that raises costs its
sequence the draft, never the answer.
"""

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from minillm.model import ModelConfig
from minillm.model.paged.tables import to_device
from minillm.serve.requests.params import Token, plain_token
from minillm.serve.requests.request import Sample
from minillm.serve.run.penalties import SeenOnHost
from minillm.serve.run.step import Step
from minillm.serve.sample.batch import NOT_FINITE
from minillm.serve.sample.seen import SeenTokens
from minillm.serve.schedule.sequence import Plan
from minillm.serve.speculate.adaptive import AdaptiveK, Counts
from minillm.serve.speculate.on_device import RowToVerify, Verdict, accepted_tokens, described_rows, verdicts
from minillm.serve.speculate.proposal import Draft, DraftRequest, DraftState, Proposer


class Speculation:
    """proposer: of the drafts. k: tokens of a draft: a number, "adaptive" or an AdaptiveK.

    counts: of all draft tokens checked so far. judge: `verdicts`.
    """

    def __init__(self, proposer: Proposer, k: int | str | AdaptiveK, config: ModelConfig):
        if k == "adaptive":
            k = AdaptiveK(cost=getattr(proposer, "cost", 0.1), most=min(8, max(1, config.max_seq_len - 2)))
        most = k.most if isinstance(k, AdaptiveK) else k
        if isinstance(most, bool) or not isinstance(most, int):
            raise ValueError(f"k {k!r} must be a whole number, 'adaptive' or an AdaptiveK.")
        if not 1 <= most <= config.max_seq_len - 2:
            raise ValueError(
                f"k {most} guesses do not fit: use 1 to {config.max_seq_len - 2}, as a prompt, k guesses and one token "
                f"more share a context of {config.max_seq_len}."
            )
        if (theirs := getattr(proposer, "vocab_size", config.vocab_size)) != config.vocab_size:
            raise ValueError(
                f"the proposer has a vocabulary of {theirs} tokens and the target one of {config.vocab_size}: guesses "
                "are token ids of the target, so take a draft with the same tokenizer."
            )
        self.proposer, self.k, self.vocab_size = proposer, k, config.vocab_size
        self.wants_hidden = proposer.wants_hidden
        self.on_verified = getattr(proposer, "on_verified", None)
        self.counts = Counts()
        self._error: str | None = None
        self.judge, self._seen_on_host, self._seen = verdicts, SeenOnHost(), SeenTokens()

    def draft(self, step: Step) -> None:
        """Gives each sample of the step draft tokens to check: the rest of its draft, or of a new one."""
        plan = step.plan
        if asked := self._ask(plan):
            drafts = self._propose(asked)
            for (sample, _), draft in zip(asked, drafts, strict=True):
                sample.drafting.draft, sample.drafting.place = draft, 0
        for place, (sample, tokens) in enumerate(plan.batch):
            if tokens >= (lacking := sample.num_uncomputed) and (state := sample.drafting) is not None:
                drafted = [] if state.draft is None else state.draft.tokens[: tokens - lacking]
                step.drafts[place] = drafted
                plan.batch[place] = sample, lacking + len(drafted)

    def verify(self, step: Step) -> tuple[list[list[Token] | None], list[tuple[Sample, Exception]]]:
        """(for each sample of `step.ready` the accepted draft tokens and one more, what raised for which).

        None: its logits are not finite; no tokens: they are not finite because of the draft, which is dropped.
        """
        logits = step.outputs.logits
        if all([sample.request.params.greedy_only for sample, _, _, _ in step.ready]):
            most, likeliest = logits.max(-1)
            best = torch.where(most.isfinite(), likeliest, NOT_FINITE).tolist()
            found = [[Verdict(token, token, False) for token in best[start:end]] for _, _, start, end in step.ready]
            faults: list[tuple[Sample, Exception]] = []
        else:
            found, faults = self._verdicts(step, logits)
        verified: list[list[Token] | None] = []
        failed = {sample.request for sample, _ in faults}
        for (sample, _, start, end), mine in zip(step.ready, found, strict=True):
            ended = sample.reason is not None or sample.request in failed
            finite = bool(mine) and mine[0].likeliest >= 0
            if mine and not finite and (ended or end - start == 1):
                verified.append(None)
            elif ended:
                verified.append([])
            elif not finite:  # a draft token may have spoilt it: 0 · nan is nan, also behind a mask
                sample.drafting.draft, sample.num_draft_tokens = None, 0
                verified.append([])
            else:
                usable = next((place for place, verdict in enumerate(mine) if verdict.likeliest < 0), len(mine))
                verified.append([plain_token(token) for token in self.check(sample, mine[:usable])])
        self._describe(step, logits, verified)
        return verified, faults

    def check(self, sample: Sample, found: list[Verdict]) -> list[int]:
        """The next tokens, by the verdicts on its draft's tokens and on what comes after them."""
        params, state = sample.request.params, self._state(sample)
        draft = state.draft or Draft([])
        checked = min(len(found), len(draft.tokens))
        if self.on_verified is not None:
            try:
                tokens, right = draft.tokens[:checked], [verdict.likeliest for verdict in found[: checked + 1]]
                self.on_verified(sample.name, sample.tokens, tokens, right)
            except Exception as failure:
                self._failed(sample, "on_verified", failure)
        ids, numbers = accepted_tokens(draft, found, params)
        sample.draw.count += numbers
        accepted = next((i for i in range(checked) if ids[i] != draft.tokens[i]), checked)
        self._count(sample, state, checked, accepted)
        state.draft = None
        if len(found) <= len(draft.tokens) and accepted == len(found):  # the rest of the draft is still to be checked
            rest = None if draft.probabilities is None else draft.probabilities[accepted:]
            state.draft, state.place = Draft(draft.tokens[accepted:], rest), state.place + accepted
            if params.temperature == 0 and not state.draft.tokens:
                state.draft = None
        if state.draft is None:
            if isinstance(self.k, AdaptiveK):
                state.tried, state.kept = self.k.fade(state.tried, state.kept, state.checked, state.accepted)
            state.drafts, state.checked, state.accepted = state.drafts + 1, 0, 0
        return ids

    def _verdicts(self, step: Step, logits: Tensor) -> tuple[list[list[Verdict]], list[tuple[Sample, Exception]]]:
        """(of each of `step.ready`, what raised for which). If it raises for all together, each is tried alone, and
        only the culprits get none."""
        rows_of = {sample: row for (sample, _), row in zip(step.plan.batch, step.rows, strict=True)}
        owners = {start: sample for sample, _, start, _ in reversed(step.ready)}  # of forks, the one that has a row
        wanted, index = [], []
        for sample, _, start, end in step.ready:
            owner = owners[start]
            wanted.append(self._rows(sample, end - start, rows_of.get(owner, 0), owner))
            index += range(start, end)
        if step.forks:
            [places] = to_device([np.array(index, np.int64)], logits.device)
            logits = logits.index_select(0, places)
        sizes = [len(rows) for rows in wanted]
        try:
            flat = self.judge(logits, [row for rows in wanted for row in rows], self._seen_on_host, self._seen)
            return [flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)], []
        except Exception:
            self._seen_on_host = SeenOnHost()  # what it says may not have come to the device
            found, faults = [], []
            for (sample, *_), rows, part in zip(step.ready, wanted, logits.split(sizes), strict=True):
                try:
                    found.append(self.judge(part, rows, self._seen_on_host, self._seen))
                except Exception as failure:
                    found.append([])
                    faults.append((sample, failure))
            return found, faults

    def _rows(self, sample: Sample, count: int, seen_row: int, owner: Sample) -> list[RowToVerify]:
        """What is to be known of the sample's rows of logits. Takes no random number: which are used shows later."""
        draft, draw = self._state(sample).draft or Draft([]), sample.draw
        before = draw.count
        numbers = [draw.uniform() for _ in range(count + 1)] if sample.request.params.temperature > 0 else None
        draw.count = before
        return [
            RowToVerify(
                sample.request.params,
                draft.tokens[:place],
                draft.tokens[place] if place < len(draft.tokens) else None,
                None if draft.probabilities is None or place >= len(draft.tokens) else draft.probabilities[place],
                (numbers[place], numbers[place + 1]) if numbers else (0.0, 0.0),
                seen_row,
                owner,
                sample.tokens,
            )
            for place in range(count)
        ]

    def _describe(self, step: Step, logits: Tensor, verified: list[list[Token] | None]) -> None:
        """Log-probabilities for the tokens of those that asked for them: one more read, if there are any."""
        wanted, where = [], []
        for number, ((sample, _, start, _), tokens) in enumerate(zip(step.ready, verified, strict=True)):
            if (count := sample.request.params.logprobs) is not None:
                for place, token in enumerate(tokens or ()):
                    wanted.append((start + place, token.id, count))
                    where.append((number, place))
        for (number, place), token in zip(where, described_rows(logits, wanted) if wanted else (), strict=True):
            verified[number][place] = token

    def request_draft(self, sample: Sample) -> None:
        """Says how many draft tokens the sample would like checked in its next step."""
        state = sample.drafting
        if state.draft is not None:
            sample.num_draft_tokens = max(1, len(state.draft.tokens))
            return
        k = self.k.k(state.tried, state.kept, state.drafts) if isinstance(self.k, AdaptiveK) else self.k
        sample.num_draft_tokens = max(0, min(k, sample.limit - sample.num_tokens - 1))

    def observe(self, step: Step) -> None:
        """Hands the hidden states of what this step verified to a proposer that wants them, each position once."""
        if step.outputs is None or step.outputs.hidden is None:
            return
        states = step.outputs.hidden.split([count for _, count in step.plan.batch])
        for (sample, tokens), start, hidden in zip(step.plan.batch, step.starts, states, strict=True):
            if sample.reason is not None:
                continue
            state = self._state(sample)
            seen = max(start, state.observed)
            end = min(start + tokens, sample.num_computed)  # not after start, if its draft spoilt its logits
            if end > seen:
                state.observed = end
                try:
                    self.proposer.observe(sample.name, seen, hidden[seen - start : end - start])
                except Exception as failure:
                    self._failed(sample, "observe", failure)

    def end(self, sample: Sample) -> None:
        self._forget(sample)
        sample.drafting = None

    def reset(self, samples: Iterable[Sample]) -> None:
        """Forgets all that there are, after a step that ended anywhere."""
        for sample in samples:
            if sample.drafting is not None:
                self.end(sample)

    def take_error(self) -> str | None:
        """What the proposer raised since the last call, for the records; it cost some draft tokens and nothing else."""
        error, self._error = self._error, None
        return error

    def _state(self, sample: Sample) -> DraftState:
        if sample.drafting is None:
            weight, prior = getattr(self.k, "weight", 0.0), getattr(self.k, "prior", 0.0)
            sample.drafting = DraftState(tried=weight, kept=weight * prior)
        return sample.drafting

    def _ask(self, plan: Plan) -> list[tuple[Sample, DraftRequest]]:
        """For samples that need a draft and whose last token this step computes."""
        asked: list[tuple[Sample, DraftRequest]] = []
        for sample, tokens in plan.batch:
            if not sample.num_draft_tokens or tokens < sample.num_uncomputed:
                continue
            if sample.drafting.draft is not None:
                continue
            params, granted = sample.request.params, tokens - sample.num_uncomputed
            if k := granted if params.temperature == 0 else sample.num_draft_tokens:
                asked.append((sample, DraftRequest(sample.name, sample.tokens, params, k, sample.draw)))
        return asked

    def _propose(self, asked: list[tuple[Sample, DraftRequest]]) -> list[Draft]:
        """A draft for each. If the proposer raises or errs, each is asked for alone, and only the culprits get none."""
        counts = [sample.draw.count for sample, _ in asked]
        try:
            drafts = self.proposer.propose([each for _, each in asked])
            if len(drafts) != len(asked):
                raise ValueError(f"the proposer gave {len(drafts)} drafts for {len(asked)} sequences: give one each.")
            for draft, (_, each) in zip(drafts, asked, strict=True):
                self._check_draft(draft, each)
            return drafts
        except Exception as failure:
            for (sample, _), count in zip(asked, counts, strict=True):
                sample.draw.count = count
            if len(asked) == 1:
                self._failed(asked[0][0], "propose", failure)
                return [Draft([])]
        return [self._propose([each])[0] for each in asked]

    def _failed(self, sample: Sample, what: str, failure: Exception) -> None:
        """The proposer's fault costs the sequence its draft; what is kept of it may be wrong, so it starts anew."""
        self._error = f"the proposer's `{what}` raised {type(failure).__name__}: {failure}"
        if what != "forget":
            self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        try:
            self.proposer.forget(sample.name)
        except Exception as failure:
            self._failed(sample, "forget", failure)
        if sample.drafting is not None:
            sample.drafting.observed = 0

    def _count(self, sample: Sample, state: DraftState, checked: int, accepted: int) -> None:
        sample.drafted, sample.accepted = sample.drafted + checked, sample.accepted + accepted
        state.checked, state.accepted = state.checked + checked, state.accepted + accepted
        self.counts.add(checked, accepted, state.place)

    def _check_draft(self, draft: Draft, asked: DraftRequest) -> None:
        tokens = draft.tokens
        if len(tokens) > asked.k or any(not 0 <= token < self.vocab_size for token in tokens):
            raise ValueError(f"the proposer's draft {tokens} must be at most {asked.k} ids below {self.vocab_size}.")
        if draft.probabilities is not None and tuple(draft.probabilities.shape) != (len(tokens), self.vocab_size):
            raise ValueError(
                f"the draft's probabilities have shape {list(draft.probabilities.shape)}: they must be "
                f"[{len(tokens)}, {self.vocab_size}], a distribution for each token."
            )
