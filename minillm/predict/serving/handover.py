"""Keys and values handed from a rank that prefills to a rank that decodes: bytes, messages, seconds, and when it pays.

    bytes        tokens · 2·L·H_kv·d·b, less what the other side has cached; whatever the two sides' tp
    messages     of a layer: every pair of ranks whose kv heads overlap
    seconds      layer by layer, while later layers compute:  c + (L - 1) · max(c, x) + x
    it pays      tokens · KV / link + latency  <  seconds of the prompt on the side that decodes

c: seconds of a layer's prefill, x: of its hand-over. A hand-over is a flow shop of two machines (Johnson 1954,
https://doi.org/10.1002/nav.3800010110): the device computes a layer while the link carries the one before it. Zhong et
al. 2024, "DistServe", §3.3 (https://arxiv.org/abs/2401.09670); Patel et al. 2024, "Splitwise", §IV.C
(https://arxiv.org/abs/2311.18677). Shapes are objects with `ModelConfig`'s attributes.
"""

from minillm.predict.model import Shape, kv_bytes_per_token
from minillm.predict.roofline import positive


def handed_bytes(shape: Shape, tokens: int, *, cached: int = 0, itemsize: int = 2, scale_bytes: int = 0) -> int:
    """Of a prompt of so many tokens, over all ranks. cached: tokens whose blocks the side that decodes has already.
    itemsize, scale_bytes: of a cached number and its scale, 1 and 4 in int8."""
    if not 0 <= cached <= tokens:
        raise ValueError(f"cached {cached} must lie in 0 .. {tokens}, the tokens of the prompt.")
    return (tokens - cached) * kv_bytes_per_token(shape, itemsize, scale_bytes=scale_bytes)


def heads_of(kv_heads: int, world_size: int, rank: int) -> range:
    """The key and value heads of one rank: its share, or, with more ranks than heads, the one that it repeats."""
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(f"{kv_heads} kv heads and {world_size} ranks: one must divide the other.")
    if world_size >= kv_heads:
        head = rank // (world_size // kv_heads)
        return range(head, head + 1)
    here = kv_heads // world_size
    return range(rank * here, (rank + 1) * here)


def routes(kv_heads: int, senders: int, receivers: int) -> list[tuple[int, int, range]]:
    """(rank that prefilled, rank that decodes, heads) of every message of a layer. Each receiver gets each of its heads
    once; of senders that hold the same head the receivers take turns."""
    found = []
    copies = max(1, senders // kv_heads)
    for receiver in range(receivers):
        wanted = heads_of(kv_heads, receivers, receiver)
        for first in range(0, senders, copies):
            held = heads_of(kv_heads, senders, first)
            both = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
            if both:
                found.append((first + receiver % copies, receiver, both))
    return found


def handover_seconds(layers: int, compute_s: float, transfer_s: float) -> float:
    """From the first layer's prefill until the last layer has arrived. compute_s, transfer_s: of all layers, which are
    equal. A layer leaves when it is computed and the one before it has left."""
    positive(layers=layers)
    compute, transfer = compute_s / layers, transfer_s / layers
    return compute + (layers - 1) * max(compute, transfer) + transfer


def hidden_share(layers: int, compute_s: float, transfer_s: float) -> float:
    """Of the transfer's seconds, those that pass while layers are computed: (L - 1) / L while the link keeps up."""
    positive(transfer_s=transfer_s)
    exposed = handover_seconds(layers, compute_s, transfer_s) - compute_s
    return 1 - exposed / transfer_s
