"""Results altered: of a cheat, which must be refused, or of a right answer in another form, which must pass."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def each_number(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of all numbers and tensors in lists, tuples and dicts."""
    if type(value) in (list, tuple):
        return type(value)(each_number(x, change) for x in value)
    if type(value) is dict:
        return {key: each_number(x, change) for key, x in value.items()}
    return change(value)


def is_float_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _scaled(value: Any) -> Any:
    return each_number(value, lambda x: x * 1.003 if isinstance(x, float) or is_float_tensor(x) else x)


def _not_a_number(value: Any) -> Any:
    return each_number(value, lambda x: x * float("nan") if isinstance(x, float) or is_float_tensor(x) else x)


def _one_not_a_number(value: Any) -> Any:
    def spoil(x: Any) -> Any:
        if not is_float_tensor(x) or not x.numel():
            return x
        x = x.clone()
        x.reshape(-1)[-1] = float("nan") if x.is_contiguous() else x.reshape(-1)[-1]
        return x

    return each_number(value, spoil)


def _shorter(value: Any) -> Any:
    return value[:-1] if isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.dim()) else value


def _longer(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value:
        return type(value)([*value, value[-1]])
    return torch.cat([value, value[-1:]]) if isinstance(value, Tensor) and value.dim() else value


def _reversed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(reversed(value))
    return value.flip(0) if isinstance(value, Tensor) and value.dim() else value


def _more_keys(value: Any) -> Any:
    return {**value, "another": next(iter(value.values()), None)} if isinstance(value, dict) else value


def _fewer_keys(value: Any) -> Any:
    return dict(list(value.items())[:-1]) if isinstance(value, dict) else value


def _one_more_axis(value: Any) -> Any:
    return each_number(value, lambda x: x[None] if isinstance(x, Tensor) else x)


def _flat(value: Any) -> Any:
    return each_number(value, lambda x: x.flatten() if isinstance(x, Tensor) else x)


# Right all the same: each must pass.


def _strided(value: Any) -> Any:
    """Tensors whose elements lie apart."""

    def spread(x: Any) -> Any:
        wide = x.new_zeros(*x.shape, 2)
        wide[..., 0] = x
        return wide[..., 0]

    return each_number(value, lambda x: spread(x.detach()) if isinstance(x, Tensor) and not x.requires_grad else x)


def _other_sequence(value: Any) -> Any:
    return tuple(value) if type(value) is list else list(value) if type(value) is tuple else value


def _ordered(value: Any) -> Any:
    return OrderedDict(value) if type(value) is dict else value


def _numpy_numbers(value: Any) -> Any:
    def numpied(x: Any) -> Any:
        tensor = torch.tensor(x, dtype=torch.float64) if type(x) is float else torch.tensor(x)
        return tensor.numpy()[()]

    return each_number(value, lambda x: numpied(x) if type(x) in (int, float) else x)


def _cloned(value: Any) -> Any:
    return each_number(value, lambda x: x.clone() if isinstance(x, Tensor) else x)


ALTERED = {
    "scaled by 1.003": _scaled,
    "all not a number": _not_a_number,
    "last not a number": _one_not_a_number,
    "one shorter": _shorter,
    "one longer": _longer,
    "in reverse": _reversed,
    "a key more": _more_keys,
    "a key less": _fewer_keys,
    "one axis more": _one_more_axis,
    "flattened": _flat,
    "strided": _strided,
    "list for tuple": _other_sequence,
    "an ordered dict": _ordered,
    "numbers of NumPy": _numpy_numbers,
    "cloned": _cloned,
}
