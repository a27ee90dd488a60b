"""How many kernels a decoding layer launches, counted on the CPU: each operation that computes or moves
something is one.

RMSNorm counts as one (torch's fused kernel), paged attention as four: keys and values written, splits, their sum.
"""

from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from minillm.model import ModelConfig, Transformer
from minillm.model.transformer import RMSNorm
from minillm.serve.run.optimise import fuse

NOTHING = ("empty", "new_empty", "detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh")


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        aliases = [each.alias_info for each in schema.arguments if each.alias_info is not None]
        view = bool(aliases) and not any(each.is_write for each in aliases)
        self.count += not view and not schema.name.partition("::")[2].startswith(NOTHING)
        return function(*args, **(kwargs or {}))

    def as_one(self, function: Callable) -> Callable:
        """The function, of which a GPU has one kernel."""

        def call(*args):
            self.count += 1
            with _disable_current_modes():
                return function(*args)

        return call


@torch.no_grad()
def of_a_layer(products_joined: bool = False, kernels: bool = False) -> int:
    """Launches of a decoding step with two layers, less those with one. kernels: the rotation and the gate, too."""
    return _of_model(2, products_joined, kernels) - _of_model(1, products_joined, kernels)


def _of_model(layers: int, products_joined: bool, kernels: bool) -> int:
    with torch.random.fork_rng(devices=()):
        model = Transformer(ModelConfig(50, 32, 64, layers, 4, 2, max_seq_len=48), seed=3)
    if products_joined:
        fuse(model)
    counter = _Counter()

    def attention(q: Tensor, k: Tensor, v: Tensor, **_) -> Tensor:
        counter.count += 4
        with _disable_current_modes():  # as the paged attention does: one token's heads after the other's
            return q.transpose(1, 2).contiguous().transpose(1, 2)

    with _kernels(counter, model if kernels else None), counter:
        model(torch.tensor([[1, 2, 3]]), torch.tensor([4, 9, 2]), attention=attention)
    return counter.count


@contextmanager
def _kernels(counter: _Counter, model: Transformer | None):
    norm = counter.as_one(RMSNorm.forward)
    with mock.patch.object(RMSNorm, "forward", lambda self, x: norm(self, x)):
        for block in model.blocks if model else ():
            block.attention.rotate_both = counter.as_one(block.attention.rotate_both)
            block.mlp.gated = counter.as_one(block.mlp.gated)
        yield
