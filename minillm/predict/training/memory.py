"""Memory of a rank of `minillm.train.Trainer`, moment by moment: what is held all the time, and where the peak is.

                 gradients                  activations                 temporaries
    loss         of earlier microbatches    all in flight, the loss's   two [chunk, V] tiles of logits
    scale        of earlier microbatches    all in flight, the loss's   the loss's gradients once more
    last block   bucket, shards or its own  without the loss's          two [T, f] gradients in the MLP, one weight's
    experts      with theirs or not yet     without what they answered  gradients of their weights, [rows, h], f
    first block  of the later blocks        of the first block          the same as in the last block
    embedding    all                        -                           tied: its two parts before their sum
    optimizer    all                        -                           with masters: one 16-bit gradient

always there: weights, masters and moments, cut by ZeRO over dp x cp; the pieces in which each group's rings receive
partial sums; in a pipeline the messages under way; with ZeRO 3 the blocks that are gathered. A bucket is made whole as
soon as its first gradient is there. T = tokens of a microbatch on this rank, f = intermediate size / tp; rows are the
(token, expert) pairs that a rank's experts compute.

On the CPU. One rank: every precision, recomputation or not; activations to the byte that `measure.memory` counts, the
peak within 2 % (with experts, in float32, both within 1 %). Several ranks: float32 and 1F1B, the peak within 5 %. On a
GPU: one rank that computes in 16 bits. Its norms are one kernel, which keeps its input alone; what its allocator rounds
up and the work space of its libraries are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.predict.model import ADAM_FP32, ADAM_MIXED, ADAM_PURE, Shape, StateBytes
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import Memory, in_flight
from minillm.predict.planner.traffic import Operation, group_size, operations, units
from minillm.predict.training import sharding
from minillm.predict.training.activations import ID, block_activation_bytes
from minillm.predict.training.moe import rank_state
from minillm.predict.training.tensor import CHUNK

UNDER_WAY = 4  # exchanges that a pipeline leaves unfinished
KEPT_PIECE = 2 << 20  # the largest piece of memory that a group keeps for its next ring


@dataclass(frozen=True)
class Recipe:
    """state: what is stored; compute: bytes per element that matmuls take and give (autocast: less than the weights').

    step_gradient: bytes per parameter while the optimizer steps; masters are stepped with float32 gradients.
    """

    state: StateBytes
    compute: int
    step_gradient: int

    @property
    def wide(self) -> int:
        """Bytes per element inside norms and softmax, which 16 bits would spoil."""
        return max(self.state.parameter, 4)

    @property
    def autocast(self) -> bool:
        return self.compute < self.state.parameter


_MASTER, _AUTOCAST = Recipe(ADAM_MIXED, 2, 4), Recipe(ADAM_FP32, 2, 4)
RECIPES = {
    "fp32": Recipe(ADAM_FP32, 4, 4),
    "bf16": _AUTOCAST,
    "fp16": _AUTOCAST,
    "bf16-master": _MASTER,
    "fp16-master": _MASTER,
    "bf16-pure": Recipe(ADAM_PURE, 2, 2),
}


@dataclass(frozen=True)
class StepMemory:
    """What a rank holds at each moment of a step, by kind. buffer: bytes of the model's buffers, in each moment."""

    moments: dict[str, Memory]
    buffer: int

    @property
    def fullest(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> Memory:
        """What is held at the fullest moment."""
        return self.moments[self.fullest]

    def most(self, kind: str) -> float:
        """The most bytes of one kind, a field of `Memory`, at any moment."""
        return max(getattr(each, kind) for each in self.moments.values())


def training_step(
    shape: Shape,
    batch: int,
    seq: int,
    precision: str = "fp32",
    *,
    accumulate: int = 1,
    recompute: bool = False,
    device: str = "cpu",
) -> StepMemory:
    """One step of one rank, of `accumulate` microbatches of [batch, seq] tokens.

    precision: a name of `RECIPES`; recompute: every block keeps its input only; device: "cpu" or "cuda". Raises
    ValueError for another name, for experts in anything but float32, and on a GPU for float32 and for a sliding window
    shorter than seq, with which it depends on GPU and version what torch's attention keeps.
    """
    if precision not in RECIPES:
        raise ValueError(f"no formula for precision {precision!r}: use one of {', '.join(RECIPES)}.")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"no formula for device {device!r}: use cpu or cuda.")
    has_mask = shape.sliding_window is not None and shape.sliding_window < seq
    if device == "cuda" and (RECIPES[precision].compute > 2 or has_mask):
        raise ValueError("what a GPU holds is known in 16 bits without a sliding window: take bf16, or device='cpu'.")
    layout = Layout(micro_batch=batch, microbatches=accumulate, recompute="full" if recompute else "none")
    return _Stage(shape, layout, seq, 0, None, RECIPES[precision], fused_norms=device == "cuda").step()


def rank_step(
    shape: Shape, layout: Layout, seq: int, stage: int = 0, arrived: Sequence[float] | None = None
) -> StepMemory:
    """One step of a rank of a pipeline stage, in float32.

    arrived: rows of a microbatch that its experts get in each of its layers; None: as many as if all experts were
    chosen equally often. Raises ValueError for a layout that `traffic.check` refuses.
    """
    return _Stage(shape, layout, seq, stage, arrived, RECIPES["fp32"]).step()


class _Stage:
    """What the moments are made of; all in bytes."""

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        seq: int,
        stage: int,
        arrived: Sequence[float] | None,
        recipe: Recipe,
        fused_norms: bool = False,
    ) -> None:
        self.shape, self.layout, self.recipe = shape, layout, recipe
        self.is_first, self.is_last = stage == 0, stage == layout.pp - 1
        self.calls = operations(shape, layout, seq, stage)
        self.ranks = group_size(layout, "dp")

        # What lies between two steps.
        self.units = units(shape, layout, stage)
        numels = [sum(self.units.blocks) + self.units.rest, sum(self.units.experts)]
        sizes = sharding.padded_all(numels, self.ranks)
        self.state = rank_state(*sizes, self.ranks, layout.ep, layout.zero, recipe.state)
        self.whole = rank_state(*sizes, self.ranks, layout.ep, 0, recipe.state).gradient  # gradients of all parameters
        self.shard = rank_state(*sizes, self.ranks, layout.ep, 2, recipe.state).gradient

        # Single tensors of a microbatch.
        t = layout.tp
        self.tokens = layout.micro_batch * (seq // layout.cp)
        between = self.tokens // (t if layout.sequence else 1)  # tokens of this rank between tensor-parallel regions
        self.rows = self.tokens * shape.hidden_size * recipe.compute
        self.stream = between * shape.hidden_size * recipe.state.parameter  # the residual stream between two blocks
        self.is_narrow = recipe.state.parameter < recipe.wide  # 16-bit weights
        self.beside = self.stream if self.is_narrow and not fused_norms else 0  # norms keep float32 copies beside it
        normed = self.stream if fused_norms else 2 * between * shape.hidden_size * recipe.wide
        self.norm = normed + self.tokens * recipe.wide  # what the last one keeps
        width = -(-shape.intermediate_size // t)
        self.inner = self.tokens * width * recipe.compute
        self.weight = shape.hidden_size * width * recipe.state.gradient  # gradient of one matrix of an MLP
        self.targets = self.tokens * ID * (2 * layout.microbatches - 1)  # and the other microbatches
        self.words = -(-shape.vocab_size // t)
        self.head = self.words * shape.hidden_size  # elements

        # What forward keeps.
        size, local_seq = recipe.state.parameter, seq // layout.cp
        self.flight = in_flight(layout, stage)
        chosen = self.tokens * shape.moe.top_k if shape.moe else 0
        self.arrived = arrived or [chosen] * len(self.units.blocks)
        order = 2 * ID * sum(chosen + (rows if layout.ep > 1 else 0) for rows in self.arrived)  # and its inverse
        where = shape, layout.micro_batch, local_seq, size, recipe.compute
        how = {"tp": layout.tp, "sequence": layout.sequence, "fused_norms": fused_norms}
        blocks = [block_activation_bytes(*where, **how, rows=rows) for rows in self.arrived]
        self.block, self.recomputes = blocks[-1], layout.recompute == "full"
        saved = len(blocks) * self.stream if self.recomputes else sum(blocks)
        positions = self.tokens * ID + 2 * local_seq * shape.head_dim * size  # and the rotation's cosines and sines
        self.kept = self.flight * (saved + order + positions)

        # When gradients come and go.
        self.buffer = shape.head_dim // 2 * 4  # the rotation's frequencies
        self.again = layout.microbatches > self.flight  # a backward has gone before
        self.earlier = self._between_microbatches() if self.again else 0
        self.scatters = layout.pp == 1 and self.ranks > 1 and layout.zero >= 2  # gradients while backward runs
        self.bucketed = self.ranks > 1 and layout.zero < 3

    def step(self) -> StepMemory:
        always = self._scratch() + self._messages() + self._gathered() + self.buffer
        moments = {}
        for name, (gradients, activations, temporaries) in self._moments().items():
            held = self.state.parameter, gradients, self.state.optimizer, activations, temporaries + always
            moments[name] = Memory(*map(round, held))
        return StepMemory(moments, self.buffer)

    def _moments(self) -> dict[str, tuple[float, float, float]]:
        """(gradients, activations, temporaries) at each moment."""
        moments = self._at_the_loss() if self.is_last else {}
        moments |= self._in_mixture() if self.shape.moe else self._in_mlp()
        if self.is_first and not self.scatters:
            parts = 2 * self.head * self.recipe.state.gradient if self.shape.tie_embeddings and self.is_last else 0
            moments["embedding"] = self.whole, 0, self.stream + parts
        state = self.recipe.state
        last = self.head if self.is_last and not self.shape.tie_embeddings else self.weight // state.gradient
        narrow = last * state.gradient if state.master else 0  # beside its float32 copy
        stepped = self._between_microbatches() * self.recipe.step_gradient / state.gradient
        moments["optimizer"] = stepped, 0, narrow
        return moments

    def _at_the_loss(self) -> dict[str, tuple[float, float, float]]:
        recipe, chunk = self.recipe, min(CHUNK, self.tokens)
        made = self.rows + self.head * recipe.wide  # gradients of x and head, made with the loss
        tile, kept = chunk * self.words, self.kept + self.norm + made
        if self.layout.tp > 1:
            product = 2 * self.rows + (self.stream if self.layout.sequence else 0)
            return {"loss": (self.earlier, kept, tile * recipe.wide + product + self.targets)}
        rounded = recipe.compute if recipe.compute < recipe.wide else 0
        tiles = max(2 * tile * recipe.wide, tile * (recipe.wide + rounded) + self.head * recipe.compute)
        casts = self.rows + self.head * recipe.compute if recipe.autocast else 0
        read = self.stream + self.beside + self.targets + chunk * (ID + recipe.wide)
        again = self.head * recipe.state.parameter if self.is_narrow else self.stream if recipe.autocast else 0
        return {"loss": (self.earlier, kept, casts + read + tiles), "scale": (self.earlier, kept, made + again)}

    def _in_mlp(self) -> dict[str, tuple[float, float, float]]:
        """In the backward pass of the last block, and of the first one, where gradients outweigh activations."""
        gradients, layers = self._gradients(), len(self.units.blocks)
        inside = self.stream + 2 * self.inner + self.targets + (0 if self.bucketed or self.scatters else self.weight)
        again = self.block + self.beside if self.recomputes else 0  # its output stands in for its input
        moments = {"last block": (gradients, self.kept + again, inside)}
        if self.recomputes:
            whole = self.kept + self.block + 2 * self.beside + self.rows  # and the output of its MLP
            moments["recomputed block"] = gradients, whole, self.stream + self.targets
        if not (self.again or self.bucketed or self.scatters):
            later = (layers - 1) * sum(self.units.blocks) // layers * self.recipe.state.gradient
            moments["first block"] = gradients + later, self.kept // layers + again, inside
        return moments

    def _in_mixture(self) -> dict[str, tuple[float, float, float]]:
        """Where experts' gradients are made, and where they move into their bucket."""
        moe, row, size = self.shape.moe, self.shape.hidden_size * self.recipe.compute, self.recipe.compute
        wide = -(-moe.intermediate_size // self.layout.tp) * size
        held, rows = moe.num_experts // self.layout.ep, self.arrived[-1]
        before = self.kept - self.tokens * moe.top_k * row  # what the experts answered is not needed any more
        made = held * 3 * moe.intermediate_size // self.layout.tp * row
        inside = 2 * rows * row + 4 * rows / held * wide  # gradients of rows out and in; of gate, up and their product
        beside, gradients = made + self.stream + self.targets, self._gradients()
        if self.layout.zero == 3 and self.layout.pp == 1:  # of the block there is what is made
            gradients = (self.shard if self.again else 0) + self.head * size
        is_new = not self.again or (self.layout.zero == 2 and self.layout.pp == 1)
        bucket = size * sum(self.units.experts) if is_new and self.layout.zero < 3 else 0
        return {
            "experts": (gradients - bucket, before, inside + beside),
            "experts' bucket": (gradients, before - rows * (row + 2 * wide), rows * row + beside),
        }

    def _between_microbatches(self) -> float:
        """Gradients between two microbatches, or before the optimizer."""
        return self.shard if self.layout.zero >= 2 and self.layout.pp == 1 else self.whole

    def _gradients(self) -> float:
        """While the last block is in its backward pass, the first to have a gradient."""
        layout, size = self.layout, self.recipe.state.gradient
        if layout.pp == 1 and layout.zero == 3:
            return self.earlier + size * (self.units.blocks[0] + self.units.experts[0])
        if self.scatters:
            return self.earlier + self.whole
        if self.bucketed or self.again:
            return self.whole
        return self.head * size if self.is_last else 0

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

    def _messages(self) -> float:
        """In a pipeline: what every microbatch in flight has handed on, and, once gradients come back, the unfinished
        exchanges."""
        if self.layout.pp == 1:
            return 0
        return (self.flight + (UNDER_WAY if self.again else 0)) * self.stream

    def _gathered(self) -> float:
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
