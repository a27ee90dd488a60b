"""What a whole Transformer and any part of one have alike, whatever they lack."""

from torch import Tensor, nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Its blocks, in the order of their layers."""
    blocks = getattr(model, "blocks", ())
    return list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)


def weight_of(model: nn.Module) -> Tensor:
    """A parameter, whose device and dtype are the model's."""
    return next(model.parameters())
