"""What both sides of a hand-over must have in common, and which rank sends which heads to which.

    2 prefill ranks, 4 kv heads     [0 1] [2 3]
                                      │ ╲   │ ╲
    4 decode ranks                  [0] [1] [2] [3]

Each side may be cut over any number of ranks, and a decode rank asks each prefill rank for the heads that both have.
Where several ranks of a side hold the same head, one of them sends it.
"""

from dataclasses import asdict, dataclass
from hashlib import blake2b

import torch

from minillm.model import ModelConfig, Transformer
from minillm.model.paged import PagedCache
from minillm.predict.serving import handover
from minillm.serve.transfer.rows import kept_as

COMPARED = {  # field -> how a refusal calls it
    "model": "models (their weights differ)",
    "layers": "numbers of layers",
    "kv_heads": "numbers of kv heads",
    "head_dim": "sizes of a head",
    "kept_as": "formats of keys and values",
}


@dataclass(frozen=True)
class Layout:
    """Of the keys and values of one side. kept_as: dtype and size of what lies in a slot, for each kv head. model: the
    digest of `digest_of`. ranks: that share the kv heads."""

    layers: int
    kv_heads: int
    head_dim: int
    kept_as: str
    model: str
    ranks: int

    @classmethod
    def of(cls, config: ModelConfig, cache: PagedCache, model: str, ranks: int) -> "Layout":
        """config: of the whole model."""
        kept = ", ".join(f"{size} {str(dtype).removeprefix('torch.')}" for dtype, size in kept_as(cache))
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, kept, model, ranks)

    def to_json(self) -> dict[str, int | str]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict) -> "Layout":
        return cls(**found)

    def refusal(self, other: "Layout") -> str | None:
        """Why keys of this side are none for the other; None if they are."""
        for name, called in COMPARED.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return (
                    f"the two sides have different {called}: {theirs} that decodes, {mine} that prefills. Start both "
                    "with the same model, dtype and kv_dtype."
                )
        return None

    def heads_of(self, rank: int) -> range:
        """The kv heads that a rank holds."""
        return handover.heads_of(self.kv_heads, self.ranks, rank)

    def sources(self, rank: int, other: "Layout") -> list[tuple[int, range]]:
        """(rank of the other side, the heads it sends) for what a rank of this side needs."""
        routes = handover.routes(self.kv_heads, other.ranks, self.ranks)
        return [(sender, heads) for sender, receiver, heads in routes if receiver == rank]


def digest_of(model: Transformer) -> str:
    """The same on rank 0 of any number of ranks, for equal weights: of the first numbers of every projection of keys,
    queries and values, which rank 0 always holds, and of every norm."""
    digest = blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if "norm" in name or any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            first = tensor.detach().flatten()[:8].to("cpu", torch.float64)
            digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()
