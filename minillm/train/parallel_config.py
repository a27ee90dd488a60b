"""A layout: how one training step is spread over ranks. Data, checked before any rank has to wait for another."""

import math
from dataclasses import dataclass
from functools import cached_property

from minillm.model import ModelConfig
from minillm.parallel.context_parallel.variants import (
    check_context,
    check_context_heads,
    sequence_multiple,
)
from minillm.parallel.expert_parallel.dispatch import check_experts
from minillm.parallel.pipeline_parallel.schedule.actions import Schedule
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.parallel.pipeline_parallel.stages import balance, layer_costs
from minillm.parallel.tensor_parallel.plan import check_heads

MAX_RANKS = 1 << 16  # of a cluster; `launch` itself starts fewer
MAX_SPLIT = 512  # tensor-parallel ranks and pipeline stages
AXES = ("dp", "pp", "cp", "tp")  # of a mesh, outermost first


@dataclass(frozen=True)
class ParallelConfig:
    """dp * pp * cp * tp ranks; neighbours share a tensor-parallel group, since that is the axis that talks most.

    dp: ranks that share the batch; zero: ZeRO stage over them, and those of cp; accumulate: microbatches of each.
    dp_replicate: ZeRO's shards lie within dp / dp_replicate ranks each, and so many such groups hold the same (hybrid
        sharding, HSDP).
    tp: ranks that share every layer; sequence: what lies between their layers is split along the sequence.
    pp: stages of layers, through which the microbatches move by `schedule`, one of `SCHEDULES`.
    cp: ranks that share every sequence, by the attention `context`, one of `CONTEXTS`; `node`: of those, the ranks that
        exchange heads in a hybrid; pad: lengthen sequences that do not divide.
    ep: of the dp ranks, neighbours that share the experts of a layer; ep_nodes: nodes that these lie on, between which
        a token travels once and inside which it goes on, to every expert that it needs there.
    axis_order: of the mesh, outermost first: which ranks are neighbours, and so share a node.
    reshard: of a pipeline with zero 3: whole weights are freed after every forward and backward of a microbatch, and
        gathered again; False: gathered once in a step and kept to its end, for their memory.

    ValueError for what fits no model; `check` looks at a model.
    """

    dp: int = 1
    zero: int = 0
    accumulate: int = 1
    tp: int = 1
    sequence: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    dp_replicate: int = 1
    cp: int = 1
    context: str = "zigzag"
    node: int = 2
    pad: bool = False
    ep: int = 1
    ep_nodes: int = 1
    axis_order: tuple[str, ...] = AXES
    reshard: bool = True

    def __post_init__(self) -> None:
        counts = {"dp": range(1, MAX_RANKS + 1), "zero": range(4), "accumulate": range(1, 1025)}
        counts |= dict.fromkeys(("tp", "pp", "cp", "node", "ep", "ep_nodes"), range(1, MAX_SPLIT + 1))
        for name, allowed in counts.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} {value} is not in {allowed.start} .. {allowed.stop - 1}.")
        if self.world_size > MAX_RANKS:
            product = " * ".join(f"{name} {size}" for name, size in self.axes.items())
            raise ValueError(f"{product} is more than {MAX_RANKS} ranks: use fewer.")
        if sorted(self.axis_order) != sorted(AXES):
            raise ValueError(f"axis_order {self.axis_order} must name each of {', '.join(AXES)} once, outermost first.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is none of {', '.join(SCHEDULES)}.")
        if not isinstance(self.dp_replicate, int) or self.dp_replicate < 1 or self.dp % self.dp_replicate:
            raise ValueError(
                f"dp_replicate {self.dp_replicate} does not divide dp {self.dp}: use a divisor of it, 1 for none."
            )
        if self.dp_replicate > 1 and self.zero == 0:
            raise ValueError(
                f"dp_replicate {self.dp_replicate} says where ZeRO's shards lie: use zero 1, 2 or 3 with it."
            )
        self._check_expert_ranks()
        if self.sequence and self.tp == 1:
            raise ValueError("sequence parallelism splits what tensor-parallel ranks share: use tp 2 or more with it.")
        check_context(self.context)
        if self.cp > 1 and self.context == "hybrid" and self.cp % self.node:
            raise ValueError(
                f"node {self.node} does not divide cp {self.cp}: a hybrid exchanges heads among `node` ranks, so use a "
                "divisor of cp."
            )
        if not self.reshard and (self.pp == 1 or self.zero < 3):
            raise ValueError(
                "reshard False keeps gathered weights through a pipeline's step: use pp 2 or more, zero 3."
            )
        _ = self.order

    def _check_expert_ranks(self) -> None:
        if self.dp % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide dp {self.dp}: expert groups are cut out of the ranks that share the "
                "batch, so use a divisor of it."
            )
        if self.dp // self.dp_replicate % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {self.dp // self.dp_replicate} ranks of dp {self.dp} that ZeRO's "
                f"shards lie on with dp_replicate {self.dp_replicate}: each of these groups has all experts."
            )
        if self.ep % self.ep_nodes:
            raise ValueError(
                f"ep_nodes {self.ep_nodes} does not divide ep {self.ep}: every node has equally many of the ranks that "
                "share the experts, so use a divisor of it, 1 for one level."
            )

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: its axes, outermost first."""
        return {axis: getattr(self, axis) for axis in self.axis_order}

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def is_hybrid(self) -> bool:
        """Whether the model or its sequences are cut: any axis beside dp has more than one rank."""
        return self.world_size > self.dp or self.ep > 1

    @cached_property
    def order(self) -> Schedule | None:
        """The pipeline's schedule; None without one. ValueError if it cannot schedule so many microbatches."""
        return SCHEDULES[self.schedule](self.pp, self.accumulate) if self.pp > 1 else None

    def check(self, config: ModelConfig, seq_len: int | None = None) -> None:
        """ValueError if a model, or a sequence, cannot be split so."""
        check_heads(config, self.tp)
        if self.ep > 1 or config.moe:
            self._check_experts(config)
        if self.order:
            balance(layer_costs(config), self.order.num_parts)
        if self.cp > 1:
            heads, kv_heads = config.num_heads // self.tp, max(1, config.num_kv_heads // self.tp)
            check_context_heads(self.context, heads, kv_heads, self.cp, self.node)
        if seq_len is not None:
            self._check_length(seq_len)
            if config.moe and config.moe.counts_tokens and self.padded(seq_len) != seq_len:
                raise ValueError(
                    f"router losses and capacities would count the padding of {seq_len} tokens to "
                    f"{self.padded(seq_len)} for cp {self.cp}: use {self.padded(seq_len)} tokens."
                )

    def _check_experts(self, config: ModelConfig) -> None:
        if config.moe is None:
            raise ValueError(f"ep {self.ep} spreads experts, but this model has none: use ep 1, or give it experts.")
        check_experts(config.moe.num_experts, self.ep)
        if config.moe.bias_update_rate is not None and self.order and len(set(self.order.routes)) > 1:
            raise ValueError(
                f"{self.schedule} holds every layer twice, and each copy would balance its own half of the "
                "microbatches: leave bias_update_rate out, or use another schedule."
            )

    def _check_length(self, seq_len: int) -> None:
        if self.cp == 1 and self.sequence and seq_len % self.tp:
            raise ValueError(
                f"a sequence of {seq_len} tokens does not divide over {self.tp} sequence-parallel ranks: use a "
                "multiple of them, or leave sequence parallelism off."
            )
        if self.cp > 1 and self.padded(seq_len) != seq_len and not self.pad:
            raise ValueError(
                f"a sequence of {seq_len} tokens does not divide into equal parts for cp {self.cp} {self.context}: use "
                f"{self.padded(seq_len)} tokens, or allow padding up to that (pad)."
            )

    def padded(self, seq_len: int) -> int:
        """The length of a sequence that every rank of cp has an equal part of, and every rank of tp of that."""
        if self.cp == 1:
            return seq_len
        shards = self.cp * (self.tp if self.sequence else 1)
        multiple = math.lcm(sequence_multiple(self.context, self.cp, self.node), shards)
        return -(-seq_len // multiple) * multiple

    def __str__(self) -> str:
        text = f"dp {self.dp}, zero {self.zero}, accumulate {self.accumulate}"
        text += f", dp_replicate {self.dp_replicate}" if self.dp_replicate > 1 else ""
        text += f", ep {self.ep}" if self.ep > 1 else ""
        text += f" on {self.ep_nodes} nodes" if self.ep_nodes > 1 else ""
        text += f", tp {self.tp}{' sequence' if self.sequence else ''}" if self.tp > 1 else ""
        text += f", pp {self.pp} {self.schedule}" if self.pp > 1 else ""
        text += f", cp {self.cp} {self.context}" if self.cp > 1 else ""
        text += "" if self.reshard else ", weights kept"
        return text + (f", order {' '.join(self.axis_order)}" if self.axis_order != AXES else "")
