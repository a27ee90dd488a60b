"""Tensor and sequence parallelism: collectives and bytes of a microbatch, and parameters of a rank.

    all-reduces   2 forward + 2 backward per layer, of [B, S, H] each; one more forward for the embedding, one more
                  backward for the head; the loss has two of its own, of 1 and 2 numbers per token
    bytes         4L · 2(t-1)/t · B·S·H·b per rank in the layers: grows with the batch, not with the weights
    sequence      every all-reduce becomes a reduce-scatter and an all-gather: the same bytes. Keeping only 1/t of a
                  region's input costs one all-gather more per region, in backward

t = world_size, L layers, B batch, S sequence, H hidden size, b bytes per element. Shoeybi et al. 2019 (Megatron-LM) §3,
Korthikanti et al. 2022 §4. Shapes are objects with `ModelConfig`'s attributes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minillm.predict import comms
from minillm.predict.comms import Cost
from minillm.predict.model import Shape
from minillm.predict.training.activations import local_widths

CHUNK = 512  # tokens whose logits the fused loss holds at a time
RINGS = {
    "all_reduce": comms.ring_all_reduce,
    "all_gather": comms.ring_all_gather,
    "reduce_scatter": comms.ring_reduce_scatter,
}


@dataclass(frozen=True)
class Call:
    """`count` collectives of `elements` elements each (all_gather: gathered). part: layers, embedding, head or loss."""

    part: str
    backward: bool
    op: str
    elements: int
    itemsize: int
    count: int = 1

    def cost(self, world_size: int) -> Cost:
        """Bytes and rounds of all calls."""
        one = RINGS[self.op](self.elements, self.itemsize, world_size)
        sent = tuple(self.count * each for each in one.sent_per_rank)
        return Cost(self.count * one.rounds, self.count * one.critical_bytes, sent)


def layer_bytes(batch: int, seq: int, hidden: int, itemsize: int, world_size: int) -> float:
    """Bytes that a rank sends per layer and microbatch: 4 · 2(t-1)/t · B·S·H·b, also with sequence parallelism."""
    return 4 * 2 * (world_size - 1) / world_size * batch * seq * hidden * itemsize


def unpaired_bytes(batch: int, seq: int, intermediate: int, itemsize: int, world_size: int) -> float:
    """Bytes that a rank sends in addition, per MLP and forward pass, if the column layer's outputs are gathered instead
    of read by a row layer as they are: (t-1)/t · B·S·F·b."""
    return (world_size - 1) / world_size * batch * seq * intermediate * itemsize


def microbatch(
    shape: Shape,
    batch: int,
    seq: int,
    itemsize: int = 4,
    *,
    sequence: bool = False,
    regather: bool = True,
    chunk: int | None = None,
) -> list[Call]:
    """Every collective of one forward and backward pass of `tensor_parallel`'s Transformer with its loss.

    itemsize: of activations; the loss works in 4 bytes or more. chunk: see `loss_chunk`; None: all tokens at once.
    regather: see `regions.Region`. No parameter is frozen. Experts are dropless; with ep, their rows are the mean over
    ranks.
    """
    table, mixtures = batch * seq * shape.hidden_size, _mixtures(shape)
    regions = 2 * shape.num_layers - mixtures
    calls = list(_sequence_calls(table, itemsize, regions, regather) if sequence else _calls(table, itemsize, regions))
    if mixtures:
        calls += _mixture_calls(shape, table, itemsize, mixtures, sequence)
    chunk = chunk or batch * seq
    for start in range(0, batch * seq, chunk):
        tokens = min(chunk, batch * seq - start)
        calls += [Call("loss", False, "all_reduce", n * tokens, max(itemsize, 4)) for n in (1, 2)]
    return calls


def loss_chunk(tokens: int, hidden_size: int, words: int) -> int:
    """Number of tokens whose logits the loss holds at once. words: logits of one token on this rank.

    The logits take no more numbers than the hidden states of all `tokens`, but are never cut below 512 tokens. That
    makes about words / H chunks, however many tokens there are.
    """
    return max(CHUNK, tokens * hidden_size // words)


def _calls(table: int, itemsize: int, regions: int) -> Iterator[Call]:
    yield Call("embedding", False, "all_reduce", table, itemsize)
    yield Call("layers", False, "all_reduce", table, itemsize, regions)
    yield Call("layers", True, "all_reduce", table, itemsize, regions)
    yield Call("head", True, "all_reduce", table, itemsize)


def _sequence_calls(table: int, itemsize: int, regions: int, regather: bool) -> Iterator[Call]:
    yield Call("embedding", False, "reduce_scatter", table, itemsize)
    yield Call("layers", False, "all_gather", table, itemsize, regions)
    yield Call("layers", False, "reduce_scatter", table, itemsize, regions)
    yield Call("head", False, "all_gather", table, itemsize)
    yield Call("head", True, "reduce_scatter", table, itemsize)
    yield Call("layers", True, "reduce_scatter", table, itemsize, regions)
    yield Call("layers", True, "all_gather", table, itemsize, regions * (2 if regather else 1))
    yield Call("embedding", True, "all_gather", table, itemsize)


def _mixture_calls(shape: Shape, table: int, itemsize: int, mixtures: int, sequence: bool) -> Iterator[Call]:
    """The region lies around the experts, so that a row for each of a token's experts is reduced; around the shared
    ones lies another. Sequence parallelism gathers what all of them read, and the gradient of what they answer."""
    for backward in (False, True):
        yield Call("layers", backward, "all_reduce", shape.moe.top_k * table, itemsize, mixtures)
        if shape.moe.shared_experts:
            yield Call("layers", backward, "all_reduce", table, itemsize, mixtures)
        if sequence:
            yield Call("layers", backward, "all_gather", table, itemsize, mixtures)


def _mixtures(shape: Shape) -> int:
    """Number of layers that have experts."""
    return shape.num_layers - len(shape.moe.dense_layers) if shape.moe else 0


def count(calls: Iterable[Call]) -> Counter[str]:
    """Number of collectives of each kind, as in a ledger's `calls`."""
    return sum((Counter({call.op: call.count}) for call in calls), Counter())


def cost(calls: Iterable[Call], world_size: int) -> Cost:
    """Bytes and rounds of all calls."""
    return sum((call.cost(world_size) for call in calls), Cost(0, 0, (0,) * world_size))


def loss_bytes_per_token(world_size: int, itemsize: int = 4) -> float:
    """Bytes that a rank sends per token for the maximum, the sum and the target's logit: 3 · 2(t-1)/t · b."""
    return 3 * 2 * (world_size - 1) / world_size * itemsize


def gathered_logits_bytes_per_token(vocab_size: int, world_size: int, itemsize: int = 4) -> float:
    """Bytes that a rank sends per token to give every rank all logits instead: (t-1)/t · V · b."""
    return (world_size - 1) / world_size * vocab_size * itemsize


def expert_parameters(shape: Shape, world_size: int = 1, ep: int = 1) -> int:
    """Parameters of routed experts that one rank holds, over all layers: 1/ep of the experts, and 1/t of each one's
    columns."""
    if shape.moe is None:
        return 0
    each = 3 * shape.hidden_size * -(-shape.moe.intermediate_size // world_size)
    return _mixtures(shape) * shape.moe.num_experts // ep * each


def parameters(shape: Shape, world_size: int, ep: int = 1) -> int:
    """Parameters that one rank holds, equally many on every rank: matrices / t, padding and copies of kv heads
    included, norms and routers whole, and of routed experts its `expert_parameters`."""
    t, h = world_size, shape.hidden_size
    q, kv, f = local_widths(shape, t)
    attention = (h + shape.qkv_bias) * (q + 2 * kv) + q * h
    norms = 2 * h + (2 * shape.head_dim if shape.qk_norm else 0)
    words = -(-shape.vocab_size // t) * h * (1 if shape.tie_embeddings else 2)
    moe, mixtures = shape.moe, _mixtures(shape)
    if moe:
        shared = 3 * h * -(-moe.shared_experts * moe.intermediate_size // t)
        words += mixtures * (h * moe.num_experts + shared) + expert_parameters(shape, t, ep)
    dense = (shape.num_layers - mixtures) * 3 * h * f
    return words + shape.num_layers * (attention + norms) + dense + h


def activation_bytes(
    batch: int, seq: int, hidden: int, heads: int, world_size: int = 1, sequence: bool = False
) -> float:
    """One layer of GPT (GeLU MLP of 4H, dropout, scores kept) in 16 bits; Korthikanti et al. 2022, equations 1, 2, 4.

    one rank           sbh (34 + 5as/h)
    tensor parallel    sbh (10 + 24/t + 5as/(ht))      norms, dropouts and region inputs are whole everywhere
    and sequence       sbh (34 + 5as/h) / t
    """
    scores = 5 * heads * seq / hidden
    whole, split = (0, 34 + scores) if sequence else (10, 24 + scores)
    return batch * seq * hidden * (whole + split / world_size)
