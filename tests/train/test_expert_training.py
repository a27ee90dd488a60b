"""Training with experts on ranks: the biases that balance without a loss move as in one process."""

import checkpoint_programs as programs
import pytest
import torch

from minillm.comm import launch
from minillm.train import SingleDevice
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.sharded import make_strategy

LAYOUTS = [
    ParallelConfig(dp=2, ep=2),
    ParallelConfig(dp=2, zero=3),
    ParallelConfig(pp=2, accumulate=programs.WINDOWS, schedule="zero_bubble"),
]


def trained(parallel, dp: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the routers' biases after them."""
    accumulate = programs.WINDOWS // dp
    ours = programs.trainer(parallel, model=programs.EXPERTS, batch_size=1, accumulate=accumulate)
    return [ours.step().loss for _ in range(3)], parallel.buffers()


def differences(group, layouts):
    """Of each layout from one process: (of losses, of biases, how many biases)."""
    torch.set_num_threads(1)
    losses, biases = trained(SingleDevice(), 1)
    found = []
    for layout in layouts:
        other_losses, other_biases = trained(make_strategy(group, layout), layout.dp)
        of_losses = max(abs(one - other) for one, other in zip(losses, other_losses, strict=True))
        of_biases = max((biases[name] - bias).abs().max().item() for name, bias in other_biases.items())
        found.append((of_losses, of_biases, len(other_biases)))
    assert all(bias.any() for bias in biases.values())
    return found


@pytest.mark.slow
def test_biases_are_those_of_one_process():
    for rank in launch(differences, 2, LAYOUTS):
        for layout, (of_losses, of_biases, number) in zip(LAYOUTS, rank, strict=True):
            assert of_losses < 1e-3 and of_biases < 1e-6, layout
            assert number == programs.EXPERTS.num_layers // layout.pp


def test_two_copies_of_a_layer_cannot_balance_it():
    layout = ParallelConfig(pp=2, accumulate=2, schedule="dualpipe")
    with pytest.raises(ValueError, match="dualpipe holds every layer twice"):
        layout.check(programs.EXPERTS)
    layout.check(programs.MODEL)
