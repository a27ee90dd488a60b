"""Units of a language model's loss."""

import math
from collections.abc import Iterable


def bits_per_byte(nats_per_token: float, tokens: int, text_bytes: int) -> float:
    """Loss in bits per byte of text: nats/token / ln 2 * tokens/bytes. Unlike nats/token it does not depend on the
    tokenizer, so models with different vocabularies compare. With characters for bytes it is bits per character."""
    return nats_per_token / math.log(2) * tokens / text_bytes


def entropy(counts: Iterable[float]) -> float:
    """Entropy in nats of a distribution given by counts: the loss of the best model that ignores all context."""
    counts = [count for count in counts if count > 0]
    total = sum(counts)
    return sum(count / total * math.log(total / count) for count in counts)
