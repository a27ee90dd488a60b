"""Peak bytes of a rank of `minillm.train.Trainer` in a layout: the fullest of three moments, as in `predict.memory`.

                 gradients                  activations                        temporaries
    loss         of earlier microbatches    all of the microbatches in flight  logits, the head's input and its gradient
    block        bucket, shards, or both    without the loss's and one [T, f]  three [T, f] inside the last MLP
    optimizer    all                        -                                  -

always there: weights and two moments, cut by ZeRO over dp x cp; the pieces in which each group's rings receive partial
sums; in a pipeline the messages under way; with ZeRO 3 the blocks that are gathered. A bucket is made whole as soon as
its first gradient is there. T = tokens of a microbatch on this rank, f = intermediate size / tp. Float32, 1F1B.
"""

from minillm.predict import fully_shard, pipeline, tensor
from minillm.predict.memory import CHUNK, ID
from minillm.predict.model import ADAM_FP32, Shape
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import Memory
from minillm.predict.planner.traffic import ITEM, Operation, group_size, operations, units
from minillm.predict.zero import padded

UNDER_WAY = 4  # exchanges that a pipeline leaves unfinished
KEPT_PIECE = 2 << 20  # the largest piece of memory that a group keeps for its next ring


def memory(shape: Shape, layout: Layout, seq: int) -> Memory:
    """Of the fullest rank at its fullest moment."""
    stages = [_Stage(shape, layout, seq, stage).fullest() for stage in range(layout.pp)]
    return max(stages, key=lambda each: each.total)


class _Stage:
    """What the moments are made of; all in bytes."""

    def __init__(self, shape: Shape, layout: Layout, seq: int, stage: int) -> None:
        self.layout, self.is_last = layout, stage == layout.pp - 1
        self.calls = operations(shape, layout, seq, stage)
        self.blocks, self.rest = units(shape, layout, stage)
        self.ranks = group_size(layout, "dp")
        self.whole = ITEM * padded([sum(self.blocks) + self.rest], self.ranks)[0]
        self.tokens, t = layout.micro_batch * (seq // layout.cp), layout.tp
        outside = self.tokens // (t if layout.sequence else 1)  # of the layers
        self.rows, self.stream = (count * shape.hidden_size * ITEM for count in (self.tokens, outside))
        self.inner = self.tokens * -(-shape.intermediate_size // t) * ITEM
        self.weight = shape.hidden_size * -(-shape.intermediate_size // t) * ITEM  # of one matrix of an MLP
        self.ids = self.tokens * ID * (2 * layout.microbatches - 1)
        words = -(-shape.vocab_size // t)
        self.head = words * shape.hidden_size * ITEM
        self.tile = min(CHUNK, self.tokens) * words * ITEM

        self.flight = pipeline.in_flight_1f1b(layout.pp, stage, layout.microbatches) if layout.pp > 1 else 1
        how = {"sequence": layout.sequence}
        block = tensor.block_activation_bytes(shape, layout.micro_batch, seq // layout.cp, t, ITEM, **how)
        positions = self.tokens * ID + (seq // layout.cp) * shape.head_dim * ITEM
        self.kept = self.flight * (len(self.blocks) * block + positions)

    def fullest(self) -> Memory:
        gradients, activations, temporaries = max(self._moments(), key=sum)
        shards = self.ranks if self.layout.zero else 1
        weights = self.whole // (shards if self.layout.zero == 3 else 1)
        moments = ADAM_FP32.moments // ITEM * self.whole // shards
        always = self._scratch() + self._messages() + self._gathered()
        return Memory(weights, gradients, moments, activations, temporaries + always)

    def _moments(self) -> list[tuple[int, int, int]]:
        """(gradients, activations, temporaries) at each."""
        again = self.layout.microbatches > self.flight  # a backward has gone before
        block = self.stream + 3 * self.inner + self.ids
        moments = [(self._gradients(again), self.kept - self.inner, block)]
        if self.is_last:
            norm = 2 * self.stream + self.tokens * ITEM
            product = 2 * self.rows + (self.stream if self.layout.sequence else 0)
            loss = self.tile + product if self.layout.tp > 1 else 2 * self.tile + self.rows
            earlier = self._earlier() if again else 0
            moments.append((earlier, self.kept + norm + self.rows + self.head, loss + self.ids))
        return [*moments, (self._earlier(), 0, 0)]

    def _earlier(self) -> int:
        """Gradients between two microbatches, or before the optimizer."""
        layout = self.layout
        cut = layout.zero >= 2 and layout.pp == 1
        return self.whole // (self.ranks if cut else 1)

    def _gradients(self, again: bool) -> int:
        """While the last block is in its backward pass, the first to have a gradient."""
        layout, block = self.layout, ITEM * self.blocks[0]
        if layout.pp == 1 and layout.zero == 3:
            return (self.whole // self.ranks if again else 0) + block
        if layout.pp == 1 and layout.zero == 2 and self.ranks > 1:
            return self.whole + (self.whole // self.ranks if again else 0)
        bucketed = self.ranks > 1 and layout.zero < 3
        return self.whole if bucketed or again else self.weight + (self.head if self.is_last else 0)

    def _scratch(self) -> int:
        """Each group keeps up to two pieces of the largest chunk that its rings added."""
        largest: dict[str, int] = {}
        for call in self.calls:
            if call.op in ("all_reduce", "reduce_scatter"):
                largest[call.axis] = max(largest.get(call.axis, 0), self._chunk(call))
        sizes = {axis: group_size(self.layout, axis) for axis in largest}
        return sum(min(2, sizes[axis] - 1) * chunk for axis, chunk in largest.items() if chunk <= KEPT_PIECE)

    def _chunk(self, call: Operation) -> int:
        return -(-call.num_bytes // group_size(self.layout, call.axis))

    def _messages(self) -> int:
        """Of a pipeline: what every microbatch in flight has handed on, and, once gradients come back, the exchanges
        that are not finished."""
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
        return fully_shard.held(self.blocks, self.rest, self.ranks).gathered
