"""Lab 07's measurements without a clock: peak bytes, FLOPs of each rank, bytes sent, and a step of 32k tokens."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course.shared.measuring import count_flops, one_thread
from minillm import measure
from minillm.comm import Group, launch
from minillm.model import ModelConfig, Transformer, dense, sdpa
from minillm.model.attention.tiled import tiled, tiled_with_lse
from minillm.parallel.context_parallel import context_attention, context_parallel
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape

LENGTHS, TILE = (128, 256, 512, 1024), 32
WORLD, WORK_SEQ, WORK_TILE = 4, 1024, 32
VARIANTS = ("zigzag", "gather", "ulysses")
SHAPES = {kv: AttentionShape(1, 1024, 8, kv, 16) for kv in (8, 2)}
LONG, LONG_TILE = 32768, 512
MODEL = ModelConfig(128, 16, 48, 1, 1, 1, max_seq_len=LONG, tie_embeddings=True)


# On one rank.


def _inputs(shape: AttentionShape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(shape.batch, heads, shape.seq, shape.head_dim) for heads in (shape.heads, *[shape.kv_heads] * 2)]
    return [torch.randn(size, generator=draw, dtype=dtype) for size in sizes]


@one_thread()
def peaks(lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    """Bytes at the fullest moment of a layer's forward and backward, by length: stored scores, and tiles."""
    found: dict[str, list[int]] = {"scores stored": [], "tiles": []}
    for seq in lengths:
        for name, attention in zip(found, (dense, partial(tiled, tile=TILE)), strict=True):
            inputs = [x.requires_grad_() for x in _inputs(AttentionShape(1, seq, 2, 2, 16))]
            with measure.memory() as seen:
                attention(*inputs).sum().backward()
            found[name].append(seen.peak.total)
            del inputs
    return found


@one_thread()
def errors(seq: int = 1024) -> dict[str, float]:
    """Largest relative differences from float64: of the package's tiles and torch's kernel in float32; and of the
    log-sum-exp that each returns."""
    shape = AttentionShape(1, seq, 2, 2, 16)
    single = _inputs(shape)
    right, right_lse = tiled_with_lse(*(x.double() for x in single), tile=seq)
    whole = dense(*(x.double() for x in single))
    out, lse = tiled_with_lse(*single, tile=64)
    found = {
        "float64, one tile": _apart(right, whole),
        "tiles": _apart(out, whole),
        "SDPA": _apart(sdpa(*single), whole),
    }
    found["lse"] = _apart(lse, right_lse)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*single, is_causal=True)
    return found | {"kernel's lse": _apart(kernel[1].reshape(lse.shape), right_lse)}


def _apart(x: Tensor, right: Tensor) -> float:
    return ((x - right).abs().max() / right.abs().max()).item()


# On several.


def count_work(group: Group) -> dict[str, int]:
    """FLOPs of this rank's matmuls in a forward ring, by order."""
    torch.set_num_threads(1)
    found = {}
    for order, name in (("contiguous", "ring"), ("zigzag", "zigzag")):
        attention = context_attention(name, group, tile=WORK_TILE)
        at = attention.positions(WORK_SEQ)
        q, k, v = (torch.randn(1, 1, len(at), 16) for _ in range(3))
        found[order] = count_flops(lambda attention=attention, q=q, k=k, v=v, at=at: attention(q, k, v, positions=at))
    return found


def work() -> dict[str, list[float]]:
    """By order: FLOPs of each rank as a share of all."""
    ranks = launch(count_work, WORLD, device="cpu")
    return {order: [rank[order] / sum(r[order] for r in ranks) for rank in ranks] for order in ranks[0]}


def count_bytes(group: Group) -> dict[tuple[str, int], tuple[int, int]]:
    """By variant and kv heads: bytes that this rank sends in a layer's forward, and in its backward."""
    torch.set_num_threads(1)
    found = {}
    for kv_heads, shape in SHAPES.items():
        for name in VARIANTS:
            attention = context_attention(name, group)
            at = attention.positions(shape.seq)
            inputs = [x[:, :, at].requires_grad_() for x in _inputs(shape)]
            with measure.ledger() as led:
                out = attention(*inputs, positions=at)
                forward = led.bytes()
                out.sum().backward()
            found[name, kv_heads] = forward, led.bytes() - forward
    return found


def traffic() -> dict[tuple[str, int], tuple[int, int]]:
    return launch(count_bytes, WORLD, device="cpu")[0]


# A long step.


@dataclass(frozen=True)
class Step:
    """A training step as one rank saw it. activations: bytes kept for backward; sent: bytes to other ranks."""

    loss: float
    grad_norm: float
    activations: int
    sent: int


class Saved:
    """Counts what autograd saves inside the block, each storage once and no parameters: the activations.

    `measure.memory` sees the same and looks at every operation besides, of which a long step has many thousands.
    """

    def __init__(self, model: Transformer) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda x: x)

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    @property
    def bytes(self) -> int:
        return sum(size for address, size in self._sizes.items() if address not in self._parameters)

    def _note(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return x


def long_step(group: Group, seq: int) -> Step:
    """Forward and backward of one sequence, of which this rank holds its zigzag part."""
    torch.set_num_threads(1)
    attention = context_attention("zigzag", group, tile=LONG_TILE)
    model = context_parallel(Transformer(MODEL, seed=0), attention)
    tokens = torch.randint(128, (1, seq + 1), generator=torch.Generator().manual_seed(0))
    mine = attention.positions(seq)
    inputs, targets = tokens[:, :-1][:, mine], tokens[:, 1:][:, mine]  # shifted first, then cut
    with measure.ledger() as led:
        with Saved(model) as kept:
            loss, _ = model(inputs, targets=targets)
        (loss / seq).backward()
    sent = led.bytes()
    gradient = group.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]))
    loss = group.all_reduce(loss.detach()) / seq
    return Step(loss.item(), gradient.norm().item(), kept.bytes, sent)


def one_and_four_ranks(seq: int = LONG) -> dict[int, list[Step]]:
    """The step on one process and on 4 ranks."""
    return {n: launch(long_step, n, seq, device="cpu", timeout=120) for n in (1, WORLD)}


def long_bytes(seq: int) -> int:
    """What a rank of four sends in that step, by the formula."""
    shape = AttentionShape(1, seq, MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
    both = context.forward_traffic("zigzag", shape, WORLD) + context.backward_traffic("zigzag", shape, WORLD)
    return MODEL.num_layers * both.bytes


def one_head_bytes(seq: int = 131072, head_dim: int = 128) -> dict[str, Any]:
    """Of one head in 16 bits: stored probabilities; and what tiles keep: q, k, v, output and a float32 per query."""
    return {"scores": 2 * seq * seq, "tiles": 4 * 2 * seq * head_dim + 4 * seq}


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the visible keys; q, k, v: [..., seq, head_dim]."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    return F.softmax(scores, -1).nan_to_num() @ v, scores.logsumexp(-1)
