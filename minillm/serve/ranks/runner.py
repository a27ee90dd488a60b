"""A `Runner` of one rank's part of a model: rank 0 tells the others each step, then all of them execute it.

    this rank's words ──┬─ rows of which all logits are read (sampled ones): all-gather of the words
                        └─ rows of which only the likeliest token is: all-gather of each rank's largest logit

Of a row of the second kind no other logit is known afterwards, and -inf stands for it: what takes the largest does not
see a difference. It costs 16 bytes a rank in place of the words' logits, and equal logits go to the lowest id as ever.
"""

import time
from math import inf

import numpy as np
import torch
from torch import Tensor

from minillm.comm import Group
from minillm.model.paged.tables import to_device
from minillm.model.parts import weight_of
from minillm.serve.ranks.message import BEAT, END, REPORT, Channel, from_numbers, to_numbers
from minillm.serve.ranks.part import group_of, sharers_of
from minillm.serve.run.model_runner import Runner, StepOutputs
from minillm.serve.run.step_inputs import StepInputs

BEAT_S = 5.0  # rank 0 is heard this often while there is nothing to compute, so that the others know it is there


class RankRunner(Runner):
    """Warm-up steps run on each rank alone; after `lead` on rank 0 and `follow` on the others, rank 0 tells the steps.

    told_s: seconds that rank 0 has spent on telling steps. waited_s: seconds that this rank has waited for a step, or
    for what another stage computes (`stage_runner.py`).
    """

    beat_s = BEAT_S

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.group, self.sharers = group_of(self.model), sharers_of(self.model)
        self.channel, self.told_s, self.waited_s = Channel(self.group), 0.0, 0.0
        self._leads, self._last = False, 0.0
        self._failure: BaseException | None = None

    def lead(self) -> None:
        """On rank 0: from now on the others are told."""
        self._leads, self._last = True, time.monotonic()

    @torch.inference_mode()
    def follow(self) -> None:
        """On the others: executes what rank 0 tells until it ends."""
        while True:
            started = time.monotonic()
            heard = self.channel.hear()
            self.waited_s += time.monotonic() - started
            if not isinstance(heard, int):
                self.execute(from_numbers(heard))
            elif heard == REPORT:
                self.channel.answer(self.waited_s)
            elif heard == END:
                return

    def waited(self) -> list[float]:
        """On rank 0: `waited_s` of every rank so far. What is under way is read before."""
        self.channel.tell_sign(REPORT)
        return [self.waited_s, *self.channel.answers()]

    def end(self) -> None:
        """On rank 0: the others are told that there are no more steps, unless they are amid one."""
        if self._leads and self._failure is None:
            self.channel.tell_sign(END)
        self._leads = False

    def ready(self) -> None:
        self.check()
        if self._leads and time.monotonic() - self._last > BEAT_S:
            self._tell(None)

    def execute(self, step: StepInputs) -> StepOutputs:
        self.check()
        try:
            if self._leads:
                self._tell(step)
            return super().execute(step)
        except BaseException as failure:
            self._failure = failure
            raise

    def check(self) -> None:
        """RuntimeError if a pass has raised: the other ranks are in the middle of it, and no step can follow."""
        if (failure := self._failure) is not None:
            raise RuntimeError(
                f"rank {self.group.rank} of {self.group.world_size} stopped amid a pass ({type(failure).__name__}: "
                f"{failure}), and the other ranks wait for it there: start the engine anew"
            ) from failure

    def _tell(self, step: StepInputs | None) -> None:
        started = time.monotonic()
        if step is None:
            self.channel.tell_sign(BEAT)
        else:
            self.channel.tell(to_numbers(step))
        self._last = time.monotonic()
        self.told_s += self._last - started

    def _forward(self, step: StepInputs, before: Tensor | None) -> StepOutputs:
        outputs = super()._forward(step, before)
        if outputs.logits is None:
            return outputs
        vocab_size, computed = self.model.config.vocab_size, weight_of(self.model).dtype
        local = outputs.logits.to(computed) if computed.itemsize < 4 else outputs.logits  # exact: they were of it
        outputs.logits = joined(local, whole_rows(step), self.sharers)[:, :vocab_size].float()
        return outputs


def whole_rows(step: StepInputs) -> np.ndarray:
    """[rows of the logits], whether more than the largest logit of a row is read."""
    sampling, rows = step.sampling, len(step.wanted)
    whole = np.full(rows, sampling is None and not step.largest_only)
    whole[step.allowed_rows] = True
    if sampling is not None and not sampling.greedy_only:
        reads = (sampling.temperature > 0) | (sampling.logprobs >= 0)
        if sampling.penalties is not None:
            reads[sampling.penalties.rows] = True
        places = np.arange(rows) if sampling.logits_rows is None else sampling.logits_rows
        whole[places[reads]] = True
    return whole


def joined(local: Tensor, whole: np.ndarray, group: Group) -> Tensor:
    """local: [rows, words], the logits of this rank's words -> [rows, world_size · words], the same on every rank: of
    the rows in `whole` all logits, of the others each rank's largest one, and -inf."""
    (rows, words), t = local.shape, group.world_size
    if t == 1:
        return local
    gathered, likeliest = to_device([np.flatnonzero(whole), np.flatnonzero(~whole)], local.device)
    if len(gathered) == rows:
        return _gather(local, group)
    logits = local.new_full((rows, t * words), -inf)
    if len(gathered):
        logits[gathered] = _gather(local[gathered], group)
    value, index = local[likeliest].max(-1)
    pairs = torch.stack((value.double(), (index + group.rank * words).double()), dim=-1)  # exact, as ids are
    values, ids = group.all_gather(pairs[None]).unbind(-1)  # [t, rows] each
    logits[likeliest[:, None], ids.T.long()] = values.T.to(logits.dtype)
    return logits


def _gather(local: Tensor, group: Group) -> Tensor:
    """[rows, words] on each rank -> [rows, world_size · words]."""
    return group.all_gather(local[None]).transpose(0, 1).flatten(1)
