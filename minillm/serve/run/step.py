"""A step on its way from its plan to its tokens, and how its inputs are made of live sequences.

plan ──▶ Step: what each sequence had when it was planned, whatever becomes of it later
           └ build: tokens, positions, tables, random numbers ──▶ StepInputs ──▶ Runner.execute ──▶ StepOutputs
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minillm.serve.requests.request import Sample
from minillm.serve.run.adapters import adapters_of
from minillm.serve.run.model_runner import StepOutputs
from minillm.serve.run.penalties import Penalised, SeenOnHost
from minillm.serve.run.step_inputs import NOTHING, Row, SamplingInputs, StepInputs, sampling_inputs
from minillm.serve.run.table_rows import TableRows
from minillm.serve.sample.allowed import allowed_first
from minillm.serve.schedule.blocks import BlockPool
from minillm.serve.schedule.sequence import Plan

NO_IDS, NO_MOVES = (NOTHING, NOTHING), NOTHING.reshape(-1, 3)
# A sample whose last token the step computes; its place in the plan; the first of its rows of the logits, and the end.
Ready = tuple[Sample, int, int, int]


@dataclass(eq=False)
class Step:
    """starts: tokens computed before, of each sequence of the plan; rows: its row of the block tables; tables: of each
    of `BlockPool.kinds`, the blocks that each sequence has in this step.

    drafts: draft tokens to compute after a sequence's own, by place in the plan. ready: the samples that get tokens;
    the first of several (n > 1) is followed by the others, once they run; forks: there is such a one. dropped: rows of
    it whose token is no good. held: a sample and the place of its token that the host has not read yet
    (`AsyncScheduling`). in_flight: steps that were not read yet when it was launched, and itself. outputs: None until
    it is executed. error: what it raised, "" = nothing; stage: where.
    """

    number: int
    started: float
    plan: Plan
    starts: list[int]
    rows: list[int]
    tables: list[list[list[int]]]
    drafts: dict[int, list[int]] = field(default_factory=dict)
    ready: list[Ready] = field(default_factory=list)
    forks: bool = False
    dropped: set[int] = field(default_factory=set)
    held: list[tuple[Sample, int]] = field(default_factory=list)
    in_flight: int = 1
    outputs: StepOutputs | None = None
    stage: str = "the forward pass"
    error: str = ""

    def raised(self, failure: Exception) -> None:
        self.error = f"{type(failure).__name__}: {failure}"

    def invalidate(self, pool: BlockPool, place: int) -> None:
        """What the pass wrote for the sequence at this place of the plan is wrong."""
        for each, tables in zip(pool.kinds, self.tables, strict=True):
            each.invalidate(tables[place], self.plan.batch[place][0].block_hashes)


class InputBuilder:
    """Makes `StepInputs`. pool: whose moves the next step carries out; rows, width: size of the block tables."""

    def __init__(self, pool: BlockPool, rows: int, width: int):
        self.pool, self.table_rows, self.seen = pool, TableRows(rows, width, len(pool.kinds)), SeenOnHost()
        self.sends_of: Callable[[Step], np.ndarray] | None = None  # of an engine that prefills for others

    def reset(self) -> None:
        """Forgets what lies on the device: the next steps write every row anew."""
        self.table_rows.reset()
        self.seen = SeenOnHost()

    def start(self, number: int, started: float, plan: Plan) -> Step:
        """The step of a plan, with rows for its sequences."""
        sequences = [sequence for sequence, _ in plan.batch]
        starts = [sequence.num_computed for sequence in sequences]
        return Step(number, started, plan, starts, *self.table_rows.update(sequences))

    def build(self, step: Step, *, sampled: bool = True, hidden: bool = False) -> StepInputs:
        """The inputs of a step whose drafts are made, and `step.ready`. Counts what its sequences put through the
        model (`forwarded`), and takes a random number for each sample if tokens are to be sampled."""
        flat, wanted = [], []
        ready, drafts = step.ready, step.drafts
        for place, ((sequence, count), start) in enumerate(zip(step.plan.batch, step.starts, strict=True)):
            sequence.forwarded += count
            tokens = sequence.tokens
            if count == 1:  # as in nearly all steps
                flat.append(tokens[start])
            else:
                flat += [*tokens[start : start + count], *drafts.get(place, ())]
            num_drafts, first, last = start + count - len(tokens), len(wanted), len(flat) - 1
            if num_drafts >= 0:
                wanted += range(last - num_drafts, last + 1) if num_drafts else (last,)
                ready.append((sequence, place, first, first + 1 + num_drafts))
        places, blocks = self.table_rows.take_changes()
        special = [s for s, _, _, _ in ready if s.num_seqs > 1 or not s.plain]
        step.forks = any(s.num_seqs > 1 for s in special)
        is_greedy = all(s.request.params.greedy_only for s in special)
        allowed_rows, allowed_ids = allowed_first(ready) if special else NO_IDS
        sampling = self._sampling(step, is_greedy) if sampled and step.ready else None
        moves = self.pool.take_moves()  # last: if anything above raises, the next step carries them out
        return StepInputs(
            tokens=np.array(flat, np.int64),
            starts=np.array(step.starts, np.int64),
            counts=np.array([count for _, count in step.plan.batch], np.int64),
            rows=np.array(step.rows, np.int64),
            moves=np.array(moves, np.int64) if moves else NO_MOVES,
            table_places=places,
            table_blocks=blocks,
            wanted=np.array(wanted, np.int64),
            allowed_rows=allowed_rows,
            allowed_ids=allowed_ids,
            hidden=hidden,
            sampling=sampling,
            largest_only=is_greedy,
            adapters=adapters_of([sequence.adapter for sequence, _ in step.plan.batch]),
            sends=NOTHING if self.sends_of is None else self.sends_of(step),
        )

    def moves_alone(self) -> StepInputs:
        """A step without tokens, for moves that cannot wait for the next sequence."""
        moves = np.array(self.pool.take_moves(), np.int64).reshape(-1, 3)
        return StepInputs(*(NOTHING,) * 4, moves, *(NOTHING,) * 5)

    def _sampling(self, step: Step, is_greedy: bool) -> SamplingInputs:
        """A row for each sample: one for a sequence, n for one whose prompt ends and that n samples go on from."""
        ready = step.ready
        if is_greedy and not step.forks:
            return SamplingInputs(len(ready))
        rows: list[Row] = []
        logits_rows: list[int] = []
        penalties: list[Penalised] = []
        for sample, place, first, _ in ready:
            samples = [sample] if sample.num_seqs == 1 else sample.request.samples
            if (penalty := sample.request.params.repetition_penalty) != 1:
                mine = (penalty, step.rows[place], sample, sample.tokens)
                penalties += [Penalised(len(rows) + i, *mine) for i in range(len(samples))]
            rows += [(each.request.params, each.tokens, each.draw) for each in samples]
            logits_rows += [first] * len(samples)
        return sampling_inputs(rows, logits_rows if step.forks else None, self.seen.penalties(penalties))
