"""Peak bytes of a rank of `minillm.train.Trainer` in a layout: the fullest of a few moments, as in `training.memory`.

                 gradients                  activations                        temporaries
    loss         of earlier microbatches    all of the microbatches in flight  logits, the head's input and its gradient
    block        bucket, shards, or both    without the loss's and one [T, f]  three [T, f] inside the last MLP
    experts      with theirs or not yet     without what they answered         gradients of their weights, [rows, h], f
    optimizer    all                        -                                  -

always there: weights and two moments, cut by ZeRO over dp x cp; the pieces in which each group's rings receive partial
sums; in a pipeline the messages under way; with ZeRO 3 the blocks that are gathered. A bucket is made whole as soon as
its first gradient is there. T = tokens of a microbatch on this rank, f = intermediate size / tp. Float32, 1F1B. Where a
layer has experts, their moments take the place of "block"; rows are the (token, expert) pairs that they compute.
"""

from collections.abc import Sequence

from minillm.predict.model import Shape
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import Memory, in_flight
from minillm.predict.planner.traffic import ITEM, Operation, group_size, operations, units
from minillm.predict.training import sharding, tensor
from minillm.predict.training.memory import CHUNK, ID
from minillm.predict.training.moe import rank_state
from minillm.predict.training.sharding import padded_all

UNDER_WAY = 4  # exchanges that a pipeline leaves unfinished
KEPT_PIECE = 2 << 20  # the largest piece of memory that a group keeps for its next ring


def memory(shape: Shape, layout: Layout, seq: int) -> Memory:
    """Bytes of the fullest rank at its fullest moment."""
    stages = [of_stage(shape, layout, seq, stage) for stage in range(layout.pp)]
    return max(stages, key=lambda each: each.total)


def of_stage(shape: Shape, layout: Layout, seq: int, stage: int, arrived: Sequence[float] | None = None) -> Memory:
    """Bytes of a rank of this stage. arrived: rows of a microbatch that its experts get in each of its layers; None: as
    many as if all experts were asked for equally."""
    return _Stage(shape, layout, seq, stage, arrived).fullest()


class _Stage:
    """What the moments are made of; all in bytes."""

    def __init__(
        self, shape: Shape, layout: Layout, seq: int, stage: int, arrived: Sequence[float] | None = None
    ) -> None:
        self.shape, self.layout, self.is_last = shape, layout, stage == layout.pp - 1
        self.calls = operations(shape, layout, seq, stage)
        self.units = units(shape, layout, stage)
        self.ranks = group_size(layout, "dp")
        sizes = padded_all([sum(self.units.blocks) + self.units.rest, sum(self.units.experts)], self.ranks)
        self.state = rank_state(*sizes, self.ranks, layout.ep, layout.zero)
        self.whole, self.shard = (rank_state(*sizes, self.ranks, layout.ep, stage).gradient for stage in (0, 2))
        self.tokens, t = layout.micro_batch * (seq // layout.cp), layout.tp
        outside = self.tokens // (t if layout.sequence else 1)  # of the layers
        self.rows, self.stream = (count * shape.hidden_size * ITEM for count in (self.tokens, outside))
        self.inner = self.tokens * -(-shape.intermediate_size // t) * ITEM
        self.weight = shape.hidden_size * -(-shape.intermediate_size // t) * ITEM  # of one matrix of an MLP
        self.ids = self.tokens * ID * (2 * layout.microbatches - 1)
        words = -(-shape.vocab_size // t)
        self.head = words * shape.hidden_size * ITEM
        self.tile = min(CHUNK, self.tokens) * words * ITEM

        self.flight = in_flight(layout, stage)
        positions = self.tokens * ID + (seq // layout.cp) * shape.head_dim * ITEM
        chosen = self.tokens * shape.moe.top_k if shape.moe else 0
        self.arrived = arrived or [chosen] * len(self.units.blocks)
        order = 2 * ID * sum(chosen + (rows if layout.ep > 1 else 0) for rows in self.arrived)  # and its inverse
        where = shape, layout.micro_batch, seq // layout.cp, t, ITEM
        blocks = (tensor.block_activation_bytes(*where, sequence=layout.sequence, rows=rows) for rows in self.arrived)
        self.kept = self.flight * (sum(blocks) + order + positions)

    def fullest(self) -> Memory:
        gradients, activations, temporaries = max(self._moments(), key=sum)
        always = self._scratch() + self._messages() + self._gathered()
        return Memory(self.state.parameter, gradients, self.state.optimizer, activations, temporaries + always)

    def _moments(self) -> list[tuple[int, int, int]]:
        """(gradients, activations, temporaries) at each moment."""
        again = self.layout.microbatches > self.flight  # a backward has gone before
        moments = self._in_mixture(again) if self.shape.moe else [self._in_mlp(again)]
        if self.is_last:
            norm = 2 * self.stream + self.tokens * ITEM
            product = 2 * self.rows + (self.stream if self.layout.sequence else 0)
            loss = self.tile + product if self.layout.tp > 1 else 2 * self.tile + self.rows
            earlier = self._earlier() if again else 0
            moments.append((earlier, self.kept + norm + self.rows + self.head, loss + self.ids))
        return [*moments, (self._earlier(), 0, 0)]

    def _in_mlp(self, again: bool) -> tuple[int, int, int]:
        """The moment in the backward pass of the last block."""
        return self._gradients(again), self.kept - self.inner, self.stream + 3 * self.inner + self.ids

    def _in_mixture(self, again: bool) -> list[tuple[int, int, int]]:
        """The moments where experts' gradients are made, and where they move into their bucket."""
        moe, row = self.shape.moe, self.shape.hidden_size * ITEM
        wide = -(-moe.intermediate_size // self.layout.tp) * ITEM
        held, rows = moe.num_experts // self.layout.ep, self.arrived[-1]
        before = self.kept - self.tokens * moe.top_k * row  # what the experts answered is not needed any more
        made = held * 3 * moe.intermediate_size // self.layout.tp * row
        inside = 2 * rows * row + 4 * rows / held * wide  # gradients of rows out and in; of gate, up and their product
        beside, gradients = made + self.stream + self.ids, self._gradients(again)
        if self.layout.zero == 3 and self.layout.pp == 1:  # of the block there is what is made
            gradients = (self.shard if again else 0) + self.head
        is_new = not again or (self.layout.zero == 2 and self.layout.pp == 1)
        bucket = ITEM * sum(self.units.experts) if is_new and self.layout.zero < 3 else 0
        return [
            (gradients - bucket, before, inside + beside),
            (gradients, before - rows * (row + 2 * wide), rows * row + beside),
        ]

    def _earlier(self) -> int:
        """Gradients between two microbatches, or before the optimizer."""
        layout = self.layout
        return self.shard if layout.zero >= 2 and layout.pp == 1 else self.whole

    def _gradients(self, again: bool) -> int:
        """While the last block is in its backward pass, the first to have a gradient."""
        layout, block = self.layout, ITEM * (self.units.blocks[0] + self.units.experts[0])
        if layout.pp == 1 and layout.zero == 3:
            return (self.shard if again else 0) + block
        if layout.pp == 1 and layout.zero == 2 and self.ranks > 1:
            return self.whole + (self.shard if again else 0)
        bucketed = self.ranks > 1 and layout.zero < 3
        return self.whole if bucketed or again else self.weight + (self.head if self.is_last else 0)

    def _scratch(self) -> int:
        """Each group keeps up to two pieces of the largest chunk that its rings added. Those of `expert_replicas` are
        touched by that group's thread alone, where a memory tracker does not see them: it counts that much less."""
        largest: dict[str, int] = {}
        for call in self.calls:
            if call.op in ("all_reduce", "reduce_scatter"):
                largest[call.axis] = max(largest.get(call.axis, 0), self._chunk(call))
        sizes = {axis: group_size(self.layout, axis) for axis in largest}
        return sum(min(2, sizes[axis] - 1) * chunk for axis, chunk in largest.items() if chunk <= KEPT_PIECE)

    def _chunk(self, call: Operation) -> int:
        return -(-call.num_bytes // group_size(self.layout, call.axis))

    def _messages(self) -> int:
        """In a pipeline: what every microbatch in flight has handed on, and, once gradients come back, the unfinished
        exchanges."""
        if self.layout.pp == 1:
            return 0
        unfinished = UNDER_WAY if self.layout.microbatches > self.flight else 0
        return (self.flight + unfinished) * self.stream

    def _gathered(self) -> int:
        """Whole weights with ZeRO 3: two neighbours' of one model, one part's in a pipeline."""
        if self.layout.zero < 3 or self.ranks == 1:
            return 0
        if self.layout.pp > 1:
            return self.whole
        copies = group_size(self.layout, "expert_replicas")
        blocks = [
            sharding.padded(block, self.ranks) + sharding.padded(experts, copies)
            for block, experts in zip(self.units.blocks, self.units.experts, strict=True)
        ]
        return sharding.fully_shard_held(blocks, sharding.padded(self.units.rest, self.ranks), 1).gathered
