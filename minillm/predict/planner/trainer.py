"""Step time of `minillm.train.Trainer` in a layout on a measured machine, for a planner that can be checked.

`step.py` predicts what large clusters run: 16-bit training whose collectives hide behind compute. Here is what the same
model of a step (`step.assemble`) takes for the program in this repository: float32, every collective waited for, one
ring per group. `traffic.py` lists its operations, `training/memory.py` its peak.

    microbatch of a stage   compute + tensor-, context- and expert-parallel operations (+ gathered weights, ZeRO 3);
                            all experts are chosen equally often
    pipeline                M microbatches and the bubble; the first crosses every border twice, alone; of the others n
                            at a time are under way, so each adds 1/n of that, or its time on the slowest border
    gradients               one bucket: nothing is reduced before the last gradient is there
"""

from dataclasses import dataclass
from itertools import pairwise

from minillm.predict.model import Shape, causal_context, training_flops
from minillm.predict.planner.clusters import Cluster
from minillm.predict.planner.layout import Layout, Path, axis_path, expert_path, gradient_path, links, path
from minillm.predict.planner.step import Microbatch, Step, assemble
from minillm.predict.planner.traffic import message_bytes, operations, units


@dataclass(frozen=True)
class Host:
    """What ranks on one machine share: its processor.

    layer_s: seconds that a microbatch costs in each layer, forward and backward, however small it is. cores: of the
    machine; the ranks of one pipeline stage compute at once, those of different stages in turn.
    """

    layer_s: float = 0.0
    cores: int | None = None

    def crowding(self, layout: Layout) -> float:
        """How many times longer computing takes because ranks share cores."""
        return max(1.0, layout.world_size / layout.pp / self.cores) if self.cores else 1.0


def step(shape: Shape, layout: Layout, cluster: Cluster, seq: int, host: Host) -> Step:
    """Seconds by cause. cluster.device.flops is what a rank reaches when it computes alone."""
    stages = [_stage(shape, layout, cluster, seq, stage, host) for stage in range(layout.pp)]
    return max(stages, key=lambda each: each.seconds)


def _stage(shape: Shape, layout: Layout, cluster: Cluster, seq: int, stage: int, host: Host) -> Step:
    """The step as if all stages were like this one."""
    spent = dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "expert_replicas", "all"), 0.0)
    once = dict.fromkeys(spent, 0.0)
    for each in operations(shape, layout, seq, stage):
        if each.axis == "pp" and each.op == "message":
            continue
        book = spent if each.each_microbatch else once
        book[each.axis] += each.seconds(_path(cluster, layout, each.axis))
    compute = _compute(shape, layout, cluster, seq, host)
    sharded = spent["dp"] + spent["expert_replicas"]  # ZeRO 2 and 3: in every microbatch
    if layout.zero == 3 and layout.pp == 1:  # while a unit computes the next one is gathered
        blocks = units(shape, layout, stage).blocks
        shared = _path(cluster, layout, "dp").crosses
        elsewhere = [axis for axis in ("tp", "cp", "ep") if _path(cluster, layout, axis).crosses != shared]
        beside = compute + sum(spent[axis] for axis in elsewhere)  # what does not use the same links
        sharded -= min(beside, sharded) * len(blocks) / (len(blocks) + 1)
    crossed, late = _crossing(cluster, layout, message_bytes(shape, layout, seq))
    return assemble(
        layout,
        Microbatch(compute, tp=spent["tp"], cp=spent["cp"], ep=spent["ep"], dp=sharded),
        tp=once["tp"],
        pp=crossed + (layout.microbatches - 1) * late + once["pp"],
        dp=once["dp"] + once["expert_replicas"],
        optimizer=once["all"],
    )


def _crossing(cluster: Cluster, layout: Layout, num_bytes: int) -> tuple[float, float]:
    """Seconds that a lone microbatch spends between stages, forward and back, and what each further microbatch adds.
    If all are under way at once, both directions of a border are used one after the other."""
    borders = _borders(cluster, layout)
    alone = 2 * sum(way.message(num_bytes) for way in borders)
    slowest = max((num_bytes / way.bandwidth for way in borders), default=0.0)
    return alone, max(alone / layout.pp, slowest * (2 if layout.microbatches <= layout.pp else 1))


def _borders(cluster: Cluster, layout: Layout) -> list[Path]:
    """The links between the stages of the first pipeline: some inside a node, some across."""
    stride = layout.stride("pp")
    nodes = [stage * stride // cluster.per_node for stage in range(layout.pp)]
    return [links(cluster, 2, in_node=2 if here == there else 1) for here, there in pairwise(nodes)]


def _path(cluster: Cluster, layout: Layout, axis: str) -> Path:
    if axis == "dp":
        return gradient_path(cluster, layout)
    if axis == "ep":
        return expert_path(cluster, layout)
    if axis == "expert_replicas":
        return path(cluster, layout.stride("dp") * layout.ep, layout.dp // layout.ep)
    if axis == "all":
        return path(cluster, 1, layout.world_size)
    return axis_path(cluster, layout, axis)


def _compute(shape: Shape, layout: Layout, cluster: Cluster, seq: int, host: Host) -> float:
    flops = training_flops(shape, causal_context(seq, shape.sliding_window)).total
    tokens = layout.micro_batch * seq / layout.cp
    alone = flops * tokens / layout.tp / cluster.device.flops + host.layer_s * shape.num_layers
    return host.crowding(layout) * alone / layout.pp
