"""What ZeRO stages 1 and 2 hold and send, from the sizes of their buckets.

    sent per step       (K + 1)·P·(N-1)/N in stage 2, 2·P·(N-1)/N in stage 1: reduce-scatters, and one all-gather
    parameters          P                                    optimizer    (master + moments)/N
    gradients at rest   P in stage 1, P/N in stage 2         on top, while backward runs, in stage 2: two buckets

N ranks, K microbatches per step, P = bytes of all parameters, every bucket padded to a multiple of N elements. With
Adam, Ψ parameters and nothing padded: 8Ψ + 8Ψ/N and 4Ψ + 12Ψ/N bytes in float32; 4Ψ + 12Ψ/N and 2Ψ + 14Ψ/N with
16-bit weights and gradients and float32 masters (Rajbhandari et al. 2020, §5).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.predict.model import ADAM_FP32, StateBytes


def padded(numels: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Elements of each bucket, rounded up to a multiple of world_size."""
    return tuple(-(-numel // world_size) * world_size for numel in numels)


@dataclass(frozen=True)
class Zero:
    """buckets: padded elements of each, in the order in which they are reduced. Results are bytes on each rank."""

    buckets: tuple[int, ...]
    world_size: int
    stage: int
    state: StateBytes = ADAM_FP32
    accumulate: int = 1

    def __post_init__(self):
        if self.stage not in (1, 2) or self.world_size < 1 or self.accumulate < 1:
            raise ValueError(
                f"stage {self.stage}, {self.world_size} ranks, {self.accumulate} microbatches: use stage 1 or 2 and at "
                "least 1 of each."
            )
        for size in self.buckets:
            if size % self.world_size:
                raise ValueError(f"a bucket of {size} elements has no {self.world_size} equal parts: use padded().")

    @property
    def elements(self) -> int:
        return sum(self.buckets)

    @property
    def reductions(self) -> int:
        """How often a bucket is reduced in one step."""
        return self.accumulate if self.stage == 2 else 1

    @property
    def collectives(self) -> dict[str, int]:
        """Per step, without the one of gradient clipping."""
        return {"reduce_scatter": self.reductions * len(self.buckets), "all_gather": len(self.buckets)}

    @property
    def sent(self) -> int:
        """What each rank sends in one step, by the ring algorithms: every part but one, once per collective."""
        others = self.elements // self.world_size * (self.world_size - 1)
        return others * (self.reductions * self.state.gradient + self.state.parameter)

    @property
    def parameter(self) -> int:
        return self.elements * self.state.parameter

    @property
    def optimizer(self) -> int:
        return self.elements // self.world_size * (self.state.master + self.state.moments)

    @property
    def gradient(self) -> int:
        """Between backward and step."""
        return self.elements * self.state.gradient // (1 if self.stage == 1 else self.world_size)

    @property
    def gradient_peak(self) -> int:
        """While backward runs. Stage 2, when bucket i is full: the shards so far (in a second microbatch all of them,
        and the part that arrives), bucket i - 1 which is on its way, and bucket i."""
        if self.stage == 1:
            return self.gradient
        most = 0
        for i, filling in enumerate(self.buckets):
            leaving = self.buckets[i - 1] if i else 0
            shards = sum(self.buckets[:i]) if self.accumulate == 1 else self.elements + leaving
            most = max(most, shards // self.world_size + leaving + filling)
        return max(most * self.state.gradient, self.gradient)

    @property
    def peak(self) -> int:
        """Model states at their fullest moment."""
        return self.parameter + self.gradient_peak + self.optimizer

    @property
    def host_link(self) -> tuple[int, int]:
        """(down, up) per step when the optimizer is offloaded: the gradient shard and the updated weights; over all
        ranks 2Ψ + 2Ψ in 16 bits (Ren et al. 2021, §3)."""
        own = self.elements // self.world_size
        return own * self.state.gradient, own * self.state.parameter
