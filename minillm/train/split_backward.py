"""A weight's gradient, computed where backward meets it."""

from collections.abc import Callable

from torch import Tensor


def weight_gradient(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """compute(), the gradient of `weight`."""
    return compute()
