"""When training blows up: back to the last good step, on past the batches that led there (Chowdhery et al. 2022, §5.1).

    step     50 ....... 60 61 62 63 !       63 is bad: not finite, or far above the recent losses; it is not applied
    weights  snapshot ──┐                   restored as they were at 50
    data     ...........................    goes on after the batch of 63: those in between are skipped

A snapshot is taken between a loss that was good and the update that follows from it, so that the weights it holds are
known to work: those after the latest update are not yet. It lies in the host's memory, pinned beside a GPU: 12 bytes
for each parameter that a rank steps (with Adam in float32), none on the device. The copy holds a step up, and every
replica has one, so guarding is off by default: nothing is copied, and a loss that is not finite ends the run.
"""

import copy
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

RECENT = 20  # losses that say what is usual
MIN_HISTORY = 5


class LossSpikeGuard:
    """capture() -> a state and restore(state): how snapshots are taken and put back.

    spike_nats: a loss so far above the median of the recent ones is bad; None: no snapshots, nothing is rolled back.
    every: steps between snapshots. patience: how many rollbacks in a row, without a snapshot between them, are tried.
    skipped: the windows of the stream, from and up to, whose updates were undone; they are not trained on again.
    """

    def __init__(
        self,
        capture: Callable[[], Any],
        restore: Callable[[Any], None],
        *,
        spike_nats: float | None = None,
        every: int = 50,
        patience: int = 3,
    ):
        self.capture, self.restore = capture, restore
        self.spike_nats, self.every, self.patience = spike_nats, every, patience
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.failures = 0
        self.skipped: list[tuple[int, int]] = []
        self._snapshot: tuple[int, Any, list[float]] | None = None
        self._position = 0  # of the stream, where the snapshot's step began

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """What is wrong with a step that has not been applied yet, or None; a good loss is remembered."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if self.spike_nats is not None and len(self.recent) >= MIN_HISTORY:
            usual = median(self.recent)
            if loss - usual > self.spike_nats:
                return f"the loss is {loss:.2f} after {usual:.2f}"
        self.recent.append(loss)
        return None

    def before_update(self, step: int, position: int = 0) -> None:
        """After a good loss, before its update: takes a snapshot if one is due. position: windows before this step."""
        if self.spike_nats is None:
            return
        if self._snapshot is None or step - self._snapshot[0] >= self.every:
            self._take(step, position, list(self.recent)[:-1])

    def _take(self, step: int, position: int, recent: list[float]) -> None:
        self._snapshot = None  # before the new one: two would take twice the memory
        self._snapshot = (step, _host_copy(self.capture()), recent)
        self._position, self.failures = position, 0

    def roll_back(self, reason: str, step: int = 0, begin: int = 0, end: int = 0) -> int:
        """Restores the snapshot and returns its step. In the first step after a resume that is the checkpoint's, which
        has not been updated. ValueError in the first step of all, or when that has been tried too often.
        begin, end: windows before and after the bad step; those since the snapshot join `skipped`."""
        if self.spike_nats is None:
            raise ValueError(
                f"{reason}, and rolling back is off (--spike-nats 2 turns it on): lower --lr and go on from the last "
                "checkpoint."
            )
        if self._snapshot is None:
            if not self.recent:
                raise ValueError(f"{reason} in the very first step: lower --lr, or check the data and the weights.")
            self._take(step, begin, list(self.recent))
        step, state, recent = self._snapshot
        self.failures += 1
        if self.failures > self.patience:
            raise ValueError(
                f"{reason}, also after going back to step {step} {self.patience} times: "
                "lower --lr or train with --precision fp32."
            )
        self.restore(_host_copy(state))  # loading may keep the tensors it is given
        self.recent = deque(recent, maxlen=RECENT)
        if self.skipped and self.skipped[-1][0] == self._position:
            self.skipped.pop()  # of the rollback before, to the same snapshot
        self.skipped.append((self._position, end))
        return step

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "skipped": [list(each) for each in self.skipped]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores recent losses and `skipped`; drops snapshots, which are of other weights."""
        self._snapshot, self._position, self.failures = None, 0, 0
        self.recent = deque(state["recent"], maxlen=RECENT)
        self.skipped = [(begin, end) for begin, end in state["skipped"]]


def _host_copy(state: Any) -> Any:
    """The same containers with copies of all that they hold, tensors on the CPU."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.copy(leaf)
        if not leaf.is_cuda:
            return leaf.detach().to("cpu", copy=True)
        return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf.detach(), non_blocking=True)

    copies = tree_map(copied, state)
    for device in {leaf.device for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
