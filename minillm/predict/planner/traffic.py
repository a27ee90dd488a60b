"""Every operation of one training step of `minillm.train.Trainer` in a layout: bytes exactly, seconds on given links.

    axis    per microbatch                                        per step
    tp      all-reduces or their halves in the layers, the loss   norms' gradients (sequence parallelism)
    cp      a ring of keys and values, and of their gradients     -
    pp      an activation and a gradient at every border          the loss
    dp      ZeRO 2: reduce-scatter; 3: two all-gathers as well    gradients, weights, two scalars
    all     -                                                     the gradient's norm

Gradients and ZeRO's shards lie over dp x cp, whose flattened group is meant by dp. Dense models in float32, AdamW,
1F1B, no recomputation, context parallelism in zigzag order; every stage has as many layers. Counts of one axis come
from its own closed form: `predict.tensor`, `predict.context`, `predict.fully_shard`, `predict.zero`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from minillm.predict import context, fully_shard, tensor
from minillm.predict.model import Shape
from minillm.predict.planner.layout import Layout, Path
from minillm.predict.zero import padded

ITEM = 4  # bytes of a float32
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that the whole tensor goes round


@dataclass(frozen=True)
class Operation:
    """`count` operations of the ranks of one axis. num_bytes: of the whole tensor, or of one rank's message."""

    axis: str
    op: str
    num_bytes: int
    count: int = 1
    each_microbatch: bool = False

    def sent(self, size: int) -> int:
        """Bytes that all `size` ranks of a group send, exact: every chunk of a ring is on the wire N - 1 times."""
        if self.op == "message":
            return self.count * self.num_bytes
        return self.count * RINGS[self.op] * (size - 1) * self.num_bytes

    def seconds(self, way: Path) -> float:
        if way.size == 1:
            return 0.0
        if self.op == "message":
            return self.count * way.message(self.num_bytes)
        if self.op == "all_reduce":
            return self.count * way.all_reduce(self.num_bytes)
        return self.count * RINGS[self.op] * way.ring(self.num_bytes)


def operations(shape: Shape, layout: Layout, seq: int, stage: int) -> list[Operation]:
    """Of one rank of a pipeline stage; `each_microbatch` ones come `layout.microbatches` times. A rank's messages of
    its two borders count for the one it shares with the stage before."""
    check(shape, layout, seq)
    return [
        *_tensor(shape, layout, seq, stage),
        *_context(shape, layout, seq),
        *_pipeline(shape, layout, seq, stage),
        *_data(shape, layout, stage),
    ]


def bytes_by_axis(shape: Shape, layout: Layout, seq: int) -> dict[str, int]:
    """What all ranks send in one step."""
    total: Counter[str] = Counter()
    for stage in range(layout.pp):
        for each in operations(shape, layout, seq, stage):
            times = layout.microbatches if each.each_microbatch else 1
            size = group_size(layout, each.axis)
            # groups of this axis that have a rank in this stage; those along pp and of all ranks count once
            groups = layout.world_size // layout.pp // (size if each.axis in ("tp", "dp") else 1)
            if each.axis == "all":
                groups = 1 if stage == 0 else 0
            if each.axis == "pp" and each.op != "message" and stage:
                groups = 0
            total[each.axis] += times * groups * each.sent(size)
    return {axis: size for axis, size in total.items() if size}


def group_size(layout: Layout, axis: str) -> int:
    """Ranks of one group; dp: of the flattened dp x cp."""
    return {"dp": layout.dp * layout.cp, "all": layout.world_size}.get(axis) or layout.size(axis)


def check(shape: Shape, layout: Layout, seq: int) -> None:
    """ValueError for what these formulas do not cover."""
    if shape.num_layers % layout.pp or layout.chunks > 1 or layout.schedule != "1f1b":
        raise ValueError(f"{shape.num_layers} layers in {layout}: use 1F1B with as many layers in every stage.")
    if layout.tp > shape.num_kv_heads:
        raise ValueError(f"tp {layout.tp} is more than {shape.num_kv_heads} kv heads: use at most one rank for each.")
    if layout.recompute != "none" or layout.ep > 1:
        raise ValueError(f"{layout}: recomputation and expert parallelism are not predicted for this machine.")
    if seq % (2 * layout.cp) or seq // layout.cp % layout.tp:
        raise ValueError(f"a sequence of {seq} tokens does not divide over cp {layout.cp} and tp {layout.tp}.")


def units(shape: Shape, layout: Layout, stage: int) -> tuple[list[int], int]:
    """Parameters of a rank's blocks, and of the rest: embedding in the first stage, last norm and head in the last."""
    whole = tensor.parameters(shape, layout.tp)
    words = -(-shape.vocab_size // layout.tp) * shape.hidden_size
    tables = words * (1 if shape.tie_embeddings else 2)
    block = (whole - tables - shape.hidden_size) // shape.num_layers
    first, last = stage == 0, stage == layout.pp - 1
    rest = words * (first + last) if not (shape.tie_embeddings and first and last) else words
    return [block] * (shape.num_layers // layout.pp), rest + (shape.hidden_size if last else 0)


def parameters(shape: Shape, layout: Layout, stage: int) -> int:
    """Of one rank before ZeRO cuts them."""
    blocks, rest = units(shape, layout, stage)
    return sum(blocks) + rest


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
    """What one layer's attention of a rank sees, before its sequence is cut."""
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
    """Of an activation between two stages."""
    tokens = layout.micro_batch * (seq // layout.cp) // (layout.tp if layout.sequence else 1)
    return tokens * shape.hidden_size * ITEM


def _data(shape: Shape, layout: Layout, stage: int) -> Iterator[Operation]:
    size, (blocks, rest) = group_size(layout, "dp"), units(shape, layout, stage)
    together = padded([sum(blocks) + rest], size)[0] * ITEM
    if size > 1:
        if layout.zero == 0:
            yield Operation("dp", "all_reduce", (sum(blocks) + rest) * ITEM)
        elif layout.zero < 3:
            often = layout.zero == 2 and layout.pp == 1
            yield Operation("dp", "reduce_scatter", together, each_microbatch=often)
            yield Operation("dp", "all_gather", together)
        else:
            one_more = layout.tp > 1 and layout.pp == 1  # the backward of a table that is split asks for its weights
            for unit, gathers in [*((block, 2) for block in blocks), (rest, 3 if one_more else 2)]:
                whole = fully_shard.padded(unit, size) * ITEM
                yield Operation("dp", "all_gather", whole, gathers, each_microbatch=True)
                yield Operation("dp", "reduce_scatter", whole, each_microbatch=layout.pp == 1)
        yield Operation("dp", "all_reduce", ITEM)  # tokens of the step
        yield Operation("dp", "all_reduce", ITEM if layout.pp == 1 else 8)  # its loss
    if layout.world_size > 1 and (layout.zero or layout.world_size > layout.dp):
        yield Operation("all", "all_reduce", 8)  # the gradient's norm
