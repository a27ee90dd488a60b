"""Every operation of one training step of `minillm.train.Trainer` in a layout: bytes exactly, seconds on given links.

    axis    per microbatch                                        per step
    tp      all-reduces or their halves in the layers, the loss   norms' gradients (sequence parallelism)
    cp      a ring of keys and values, and of their gradients     -
    ep      how many rows come, and four all-to-alls per layer    -
    pp      an activation and a gradient at every border          the loss
    dp      ZeRO 2: reduce-scatter; 3: two all-gathers as well    gradients, weights, two scalars
    all     -                                                     the gradient's norm

Gradients and ZeRO's shards lie over dp x cp, whose flattened group is meant by dp; with ep, those of experts over the
dp / ep ranks that have the same ones, `expert_replicas`. Float32, AdamW, 1F1B, no recomputation, context parallelism in
zigzag order; every stage has as many layers. Experts are dropless, in every layer or none, without cp. Where their rows
go depends on the data: the bytes of an all-to-all are those of a router that chooses all experts equally often, unless
a run's own count is given. Counts of one axis come from its own closed form in `predict.training`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from minillm.predict.model import ExpertShape, Shape
from minillm.predict.planner.layout import Layout, Path
from minillm.predict.training import context, moe, sharding, tensor
from minillm.predict.training.activations import ID
from minillm.predict.training.sharding import padded_all

ITEM = 4  # bytes of a float32
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that the whole tensor goes round


@dataclass(frozen=True)
class Operation:
    """`count` operations of the ranks of one axis. num_bytes: of the whole tensor; for messages of one message, for an
    all-to-all of what one rank sends."""

    axis: str
    op: str
    num_bytes: int
    count: int = 1
    each_microbatch: bool = False

    def sent(self, size: int) -> int:
        """Bytes that all `size` ranks of a group send, exact: every chunk of a ring is on the wire N - 1 times."""
        if self.op == "message":
            return self.count * self.num_bytes
        if self.op == "all_to_all":
            return self.count * size * self.num_bytes
        return self.count * RINGS[self.op] * (size - 1) * self.num_bytes

    def seconds(self, way: Path) -> float:
        if way.size == 1:
            return 0.0
        if self.op == "message":
            return self.count * way.message(self.num_bytes)
        if self.op == "all_to_all":  # pairwise, in N - 1 rounds
            return self.count * (way.size - 1) * way.message(self.num_bytes / (way.size - 1))
        if self.op == "all_reduce":
            return self.count * way.all_reduce(self.num_bytes)
        return self.count * RINGS[self.op] * way.ring(self.num_bytes)


def operations(shape: Shape, layout: Layout, seq: int, stage: int) -> list[Operation]:
    """Operations of one rank of a pipeline stage; `each_microbatch` ones come `layout.microbatches` times. A rank's
    messages of its two borders count for the one it shares with the stage before."""
    check(shape, layout, seq)
    return [
        *_tensor(shape, layout, seq, stage),
        *_context(shape, layout, seq),
        *_experts(shape, layout, seq),
        *_pipeline(shape, layout, seq, stage),
        *_data(shape, layout, stage),
    ]


def bytes_by_axis(shape: Shape, layout: Layout, seq: int, crossing: int | None = None) -> dict[str, int]:
    """Bytes that all ranks send in one step, by axis. crossing: rows that left their rank for an expert, of all ranks,
    layers and microbatches; None: as many as if all experts were chosen equally often."""
    total: Counter[str] = Counter()
    if crossing is not None:
        total["ep"] = sum(moe.ALL_TO_ALLS.values()) * crossing * shape.hidden_size * ITEM
    for stage in range(layout.pp):
        for each in operations(shape, layout, seq, stage):
            if each.op == "all_to_all" and crossing is not None:
                continue
            times = layout.microbatches if each.each_microbatch else 1
            size = group_size(layout, each.axis)
            # groups of this axis that have a rank in this stage; those along pp and of all ranks count once
            groups = layout.world_size // layout.pp // (1 if each.axis in ("cp", "pp") else size)
            if each.axis == "all":
                groups = 1 if stage == 0 else 0
            if each.axis == "pp" and each.op != "message" and stage:
                groups = 0
            total[each.axis] += times * groups * each.sent(size)
    return {axis: size for axis, size in total.items() if size}


def group_size(layout: Layout, axis: str) -> int:
    """Ranks of one group; dp: of the flattened dp x cp."""
    shared = layout.dp * layout.cp
    special = {"dp": shared, "expert_replicas": shared // layout.ep, "all": layout.world_size}
    return special.get(axis) or layout.size(axis)


def check(shape: Shape, layout: Layout, seq: int) -> None:
    """Raises ValueError for layouts and models that these formulas do not cover."""
    if shape.num_layers % layout.pp or layout.chunks > 1 or layout.schedule != "1f1b":
        raise ValueError(f"{shape.num_layers} layers in {layout}: use 1F1B with as many layers in every stage.")
    if layout.tp > shape.num_kv_heads:
        raise ValueError(f"tp {layout.tp} is more than {shape.num_kv_heads} kv heads: use at most one rank for each.")
    if layout.recompute == "light" or (layout.recompute == "full" and layout.world_size > 1):
        raise ValueError(f"{layout}: recomputation is not predicted for this machine, but for one rank that does all.")
    if shape.moe or layout.ep > 1:
        _check_experts(shape.moe, layout)
    if (layout.cp > 1 and seq % (2 * layout.cp)) or seq // layout.cp % layout.tp:
        raise ValueError(f"a sequence of {seq} tokens does not divide over cp {layout.cp} and tp {layout.tp}.")


def _check_experts(experts: ExpertShape | None, layout: Layout) -> None:
    if experts is None:
        raise ValueError(f"ep {layout.ep} spreads experts, but this model has none: use ep 1.")
    if experts.num_experts % layout.ep or layout.dp % layout.ep:
        raise ValueError(
            f"ep {layout.ep} does not divide {experts.num_experts} experts and dp {layout.dp}: use a divisor of both."
        )
    drops = experts.capacity(1) is not None
    if layout.cp > 1 or experts.dense_layers or drops or experts.bias_update_rate is not None:
        raise ValueError(
            f"{layout}: experts beside context parallelism or dense layers, that drop tokens or have balancing biases, "
            "are not predicted for this machine: use cp 1, experts in every layer that tokens choose, and neither "
            "capacity_factor nor bias_update_rate."
        )


@dataclass(frozen=True)
class Units:
    """Parameters of one rank before ZeRO cuts them: of each block; of the rest, which is the embedding in the first
    stage, the last norm and the head in the last; and of each block's experts, where fewer ranks average them (ep)."""

    blocks: list[int]
    rest: int
    experts: list[int]

    @property
    def total(self) -> int:
        return sum(self.blocks) + self.rest + sum(self.experts)


def units(shape: Shape, layout: Layout, stage: int) -> Units:
    whole = tensor.parameters(shape, layout.tp, layout.ep)
    experts = tensor.expert_parameters(shape, layout.tp, layout.ep) if layout.ep > 1 else 0
    words = -(-shape.vocab_size // layout.tp) * shape.hidden_size
    tables = words * (1 if shape.tie_embeddings else 2)
    block = (whole - experts - tables - shape.hidden_size) // shape.num_layers
    first, last = stage == 0, stage == layout.pp - 1
    rest = words * (first + last) if not (shape.tie_embeddings and first and last) else words
    here = shape.num_layers // layout.pp
    return Units([block] * here, rest + (shape.hidden_size if last else 0), [experts // shape.num_layers] * here)


def parameters(shape: Shape, layout: Layout, stage: int) -> int:
    """Parameters of one rank before ZeRO cuts them."""
    return units(shape, layout, stage).total


def _tensor(shape: Shape, layout: Layout, seq: int, stage: int) -> Iterator[Operation]:
    if layout.tp == 1:
        return
    tokens = layout.micro_batch * (seq // layout.cp)
    chunk = tensor.loss_chunk(tokens, shape.hidden_size, -(-shape.vocab_size // layout.tp))
    calls = tensor.microbatch(shape, layout.micro_batch, seq // layout.cp, ITEM, sequence=layout.sequence, chunk=chunk)
    here = {"layers": True, "embedding": stage == 0, "head": stage == layout.pp - 1, "loss": stage == layout.pp - 1}
    for call in calls:
        if here[call.part]:
            count = call.count // (layout.pp if call.part == "layers" else 1)
            yield Operation("tp", call.op, call.elements * call.itemsize, count, each_microbatch=True)
    if layout.sequence:
        norms = 2 * shape.hidden_size * shape.num_layers // layout.pp
        norms += shape.hidden_size if stage == layout.pp - 1 else 0
        yield Operation("tp", "all_reduce", norms * ITEM // (group_size(layout, "dp") if layout.zero else 1))


def attention_shape(shape: Shape, layout: Layout, seq: int) -> context.AttentionShape:
    """The shape of one layer's attention on a rank, before the sequence is cut."""
    heads, kv_heads = shape.num_heads // layout.tp, shape.num_kv_heads // layout.tp
    return context.AttentionShape(layout.micro_batch, seq, heads, kv_heads, shape.head_dim)


def _context(shape: Shape, layout: Layout, seq: int) -> Iterator[Operation]:
    if layout.cp == 1:
        return
    layers, block = shape.num_layers // layout.pp, attention_shape(shape, layout, seq).block_bytes(layout.cp)
    rounds = layers * (layout.cp - 1)
    yield Operation("cp", "message", block, rounds, each_microbatch=True)
    yield Operation("cp", "message", 2 * block, rounds, each_microbatch=True)  # backward: a block and a gradient
    yield Operation("cp", "message", block, layers, each_microbatch=True)  # the last gradient comes home


def _experts(shape: Shape, layout: Layout, seq: int) -> Iterator[Operation]:
    if layout.ep == 1:
        return
    tokens, layers = layout.micro_batch * seq, shape.num_layers // layout.pp
    sent = moe.all_to_all_bytes(tokens, shape.moe.top_k, shape.hidden_size, ITEM, layout.ep)
    yield Operation("ep", "all_gather", layout.ep * shape.moe.num_experts * ID, layers, each_microbatch=True)
    yield Operation("ep", "all_to_all", round(sent), sum(moe.ALL_TO_ALLS.values()) * layers, each_microbatch=True)


def _pipeline(shape: Shape, layout: Layout, seq: int, stage: int) -> Iterator[Operation]:
    if layout.pp == 1:
        return
    if stage:
        yield Operation("pp", "message", message_bytes(shape, layout, seq), 2, each_microbatch=True)
        if shape.tie_embeddings and stage == layout.pp - 1:
            table = -(-shape.vocab_size // layout.tp) * shape.hidden_size * ITEM
            yield Operation("pp", "message", table, 2)
    yield Operation("pp", "all_reduce", 8)


def message_bytes(shape: Shape, layout: Layout, seq: int) -> int:
    """Bytes of an activation between two stages."""
    tokens = layout.micro_batch * (seq // layout.cp) // (layout.tp if layout.sequence else 1)
    return tokens * shape.hidden_size * ITEM


def _data(shape: Shape, layout: Layout, stage: int) -> Iterator[Operation]:
    own = units(shape, layout, stage)
    yield from _averaged(layout, "dp", own.blocks, own.rest)
    yield from _averaged(layout, "expert_replicas", own.experts, 0)
    if group_size(layout, "dp") > 1:
        yield Operation("dp", "all_reduce", ITEM)  # tokens of the step
        yield Operation("dp", "all_reduce", ITEM if layout.pp == 1 else 8)  # its loss
    if layout.world_size > 1 and (layout.zero or layout.ep > 1 or layout.world_size > layout.dp):
        yield Operation("all", "all_reduce", 8)  # the gradient's norm


def _averaged(layout: Layout, axis: str, blocks: list[int], rest: int) -> Iterator[Operation]:
    """Operations on gradients and weights that all ranks of one axis hold alike."""
    size, numel = group_size(layout, axis), sum(blocks) + rest
    if size == 1 or not numel:
        return
    together = padded_all([numel], group_size(layout, "dp"))[0] * ITEM  # every bucket alike
    if layout.zero == 0:
        yield Operation(axis, "all_reduce", numel * ITEM)
    elif layout.zero < 3:
        often = layout.zero == 2 and layout.pp == 1
        yield Operation(axis, "reduce_scatter", together, each_microbatch=often)
        yield Operation(axis, "all_gather", together)
    else:
        one_more = layout.tp > 1 and layout.pp == 1  # the backward of a table that is split asks for its weights
        for unit, gathers in [*((block, 2) for block in blocks), (rest, 3 if one_more else 2)]:
            if unit:
                whole = sharding.padded(unit, size) * ITEM
                yield Operation(axis, "all_gather", whole, gathers, each_microbatch=True)
                yield Operation(axis, "reduce_scatter", whole, each_microbatch=layout.pp == 1)
