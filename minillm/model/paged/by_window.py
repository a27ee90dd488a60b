"""One attention function of two: layers with a sliding window have their keys in blocks of their own, so that these can
be given back while layers that see everything keep theirs (`BlockPool.windowed`)."""

from torch import Tensor

from minillm.model.attention.causal import AttentionFunction
from minillm.model.paged.cache import PagedAttention


def by_window(every: PagedAttention, windowed: PagedAttention | None = None) -> AttentionFunction:
    """Layers with a window attend by `windowed`, the others by `every`; None = all by `every`."""
    if windowed is None:
        return every

    def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, **options) -> Tensor:
        return (every if window is None else windowed)(q, k, v, window=window, **options)

    return attend
