"""Parts of the model for a pipeline: which layers go where, and a module that holds some of them.

    whole model    embedding  block 0  block 1 | block 2  block 3  block 4 | block 5  norm  head
    part                      0                |           1               |        2
    parameters     embedding.weight blocks.0.. |  blocks.2.. ... blocks.4..| blocks.5.. norm.weight head.weight

A part keeps the names of the whole model, so its initial values, its checkpoint and its gradients are those of one
process, name by name. Where the embedding is the head too (tied), the first and the last part hold a copy each: the
sum of both gradients is its gradient (`Pipeline.finish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from minillm.model.attention import AttentionFunction, sdpa
from minillm.model.config import ModelConfig, refuse_beyond
from minillm.model.initialise import WithoutInitialisation
from minillm.model.rope import Rope
from minillm.model.transformer import Block, Decoder, RMSNorm, _linear, check_tokens
from minillm.parallel.pipeline_parallel.schedule.actions import Schedule


class ModelPart(Decoder):
    """Some of a Transformer's layers. `ModelPart(config, range(0, 2), first=True, last=False)(tokens)` -> hidden.

    first: it starts with the embedding; last: it ends with norm and head, which `loss` and `logits` apply to what
    `forward` returned. seed, device, dtype and attention are as in Transformer; goals and router_losses are those of
    the microbatch that it computes, the latter with its factor. sequence_shards: ranks among which sequence parallelism
    splits each sequence outside of the layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        first: bool,
        last: bool,
        seed: int | None = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        attention: AttentionFunction = sdpa,
    ) -> None:
        super().__init__(config, attention)
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.num_layers:
            raise ValueError(f"layers {layers} do not lie in the model's {config.num_layers}: give range(start, stop)")
        refuse_beyond(config, "pipeline parallelism", ("embedding_scale", "logit_soft_cap", "norm_offset"))
        self.layers, self.first, self.last, self.sequence_shards = layers, first, last, 1
        device = torch.device(device or torch.get_default_device())
        tied, width = config.tie_embeddings, config.hidden_size
        with torch.device("meta"), WithoutInitialisation():
            embeds = first or (last and tied)
            self.embedding = nn.Embedding(config.vocab_size, width, dtype=dtype) if embeds else None
            self.rope = Rope(config)
            self.blocks = nn.ModuleDict({str(layer): Block(config, layer, dtype) for layer in layers})
            self.norm = RMSNorm(width, config.norm_eps, dtype) if last else None
            self.head = _linear(width, config.vocab_size, dtype) if last and not tied else None
        self.to_empty(device=device)
        if seed is not None and device.type != "meta":
            self.initialize(seed)

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of parameters that another part holds too, and whose gradients have to be added up."""
        return ("embedding.weight",) if self.config.tie_embeddings and self.first != self.last else ()

    def forward(
        self, x: Tensor, positions: Tensor | None = None, *, attention: AttentionFunction | None = None
    ) -> Tensor:
        """x: tokens [batch, seq] if it is the first part, else hidden [batch, seq, hidden] -> hidden after its blocks.

        hidden is [batch, seq / sequence_shards, hidden] between parts that are sequence-parallel.
        positions: [seq] or [batch, seq], where the tokens stand; None = 0 .. seq - 1.
        """
        seq_len = x.shape[1] * (1 if self.first else self.sequence_shards)
        if positions is None and self.positions_of:
            positions = self.positions_of(seq_len, x.device)
        if self.first:
            check_tokens(x, self.config, positions)
        x = self.embedding(x) if self.first else x
        rotation = self.rope(torch.arange(seq_len, device=x.device) if positions is None else positions, x.dtype)
        more = (self.router_losses,) if self.router_losses and torch.is_grad_enabled() else ()
        for block in self.blocks.values():
            x = block(x, rotation, attention or self.attention, positions, *more)
        return x

    @property
    def _head(self) -> Tensor:
        if not self.last:
            raise ValueError(f"the part with layers {self.layers} has no head: only the last part has")
        return super()._head


def build_parts(
    config: ModelConfig, schedule: Schedule, rank: int, ranges: Sequence[range] | None = None, **options
) -> list[ModelPart]:
    """The parts that `rank` holds under `schedule`, in the order of its chunks.

    ranges: the layers of each part, counted from the input; None: balanced by `layer_costs`. options: as in ModelPart.
    ValueError if there are more parts than layers.
    """
    ranges = balance(layer_costs(config), schedule.num_parts) if ranges is None else ranges
    if len(ranges) != schedule.num_parts:
        raise ValueError(
            f"{len(ranges)} ranges of layers for the {schedule.num_parts} parts of {schedule.name}: one each"
        )
    held = sorted((place.chunk, part) for place, part in schedule.part_of.items() if place.rank == rank)
    last = schedule.num_parts - 1
    return [ModelPart(config, ranges[part], first=part == 0, last=part == last, **options) for _, part in held]


def layer_costs(config: ModelConfig) -> list[float]:
    """Parameters of each layer; the embedding counts to the first one, norm and head (a copy, if tied) to the last."""
    whole = ModelPart(config, range(config.num_layers), first=True, last=True, device="meta")
    costs = [float(sum(p.numel() for p in block.parameters())) for block in whole.blocks.values()]
    ends = config.vocab_size * config.hidden_size
    costs[0] += ends
    costs[-1] += ends + config.hidden_size
    return costs


def balance(costs: Sequence[float], parts: int) -> list[range]:
    """Cuts layers into `parts` stretches of neighbours, at least one layer each; the dearest is as cheap as can be.

    costs: of each layer: parameters, FLOPs, measured seconds. The slowest stage sets the pace of the whole pipeline, so
    the largest sum counts and not the mean. Dynamic programming over (layers so far, stretches so far); among equals
    the earlier cut, so that later stages, which hold fewer microbatches, take what is left over.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}: a pipeline has at least one")
    if parts > len(costs):
        raise ValueError(
            f"{parts} parts need {parts} layers, but the model has {len(costs)}: use fewer stages or chunks"
        )
    if min(costs) < 0:
        raise ValueError(f"a layer costs {min(costs)}: costs are 0 or more")
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    best = list(upto)  # best[end]: the dearest stretch if the layers before `end` are cut into as many as so far
    cuts: list[list[int]] = []
    for count in range(2, parts + 1):
        found = [(float("inf"), 0)] * len(best)
        for end in range(count, len(best)):
            found[end] = min((max(best[at], upto[end] - upto[at]), at) for at in range(count - 1, end))
        best, cut = (list(column) for column in zip(*found, strict=True))
        cuts.append(cut)
    ends = [len(costs)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends = [0, *reversed(ends)]
    return [range(start, stop) for start, stop in pairwise(ends)]
