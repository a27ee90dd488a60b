"""Training with experts on ranks: the biases that balance without a loss move as in one process."""

import checkpoint_programs as programs
import pytest
import torch

import minillm.train.trainer as trainer_module
from minillm.comm import launch
from minillm.model.moe import MoE
from minillm.train import SingleDevice
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

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


@pytest.mark.full
def test_biases_are_those_of_one_process():
    for rank in launch(differences, 2, LAYOUTS):
        for layout, (of_losses, of_biases, number) in zip(LAYOUTS, rank, strict=True):
            assert of_losses < 1e-3 and of_biases < 1e-6, layout
            assert number == programs.EXPERTS.num_layers // layout.pp


def test_what_a_step_counts_that_is_rolled_back_moves_no_bias(monkeypatch):
    run, counted = programs.trainer(model=programs.EXPERTS, spike_nats=2.0), []
    update = trainer_module.update_balance_biases

    def counting(model, sum_over_ranks):
        counted.append([int(layer.load.sum()) for layer in model.modules() if isinstance(layer, MoE)])
        update(model, sum_over_ranks)

    monkeypatch.setattr(trainer_module, "update_balance_biases", counting)
    assert run.step().applied
    sound = run.loss_spikes.problem
    monkeypatch.setattr(run.loss_spikes, "problem", lambda *_: "it is planted")
    assert "it is planted; back to step 0" in run.step().rollback
    monkeypatch.setattr(run.loss_spikes, "problem", sound)
    assert run.step().applied
    of_a_step = 4 * 16 * programs.EXPERTS.moe.top_k  # 4 windows of 16 tokens
    assert counted == 2 * [programs.EXPERTS.num_layers * [of_a_step]]


def test_two_copies_of_a_layer_cannot_balance_it():
    layout = ParallelConfig(pp=2, accumulate=2, schedule="dualpipe")
    with pytest.raises(ValueError, match="dualpipe holds every layer twice"):
        layout.check(programs.EXPERTS)
    layout.check(programs.MODEL)
