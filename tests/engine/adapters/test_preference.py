"""Direct preference optimization against autograd of its formula, in one process and on ranks, in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minillm.adapters import LoraConfig, attach
from minillm.adapters.attach import adapter_parameters
from minillm.adapters.start import Start
from minillm.comm import launch
from minillm.data.dataset import IGNORE
from minillm.model import ModelConfig, Transformer, dense
from minillm.train.parallel_config import ParallelConfig
from minillm.train.preference import Preference
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import Microbatch, SingleDevice
from tests.engine.comm.nccl_like import make_nccl_like_strategy

SHAPE = ModelConfig(37, 12, 20, 2, 4, 2, head_dim=4, max_seq_len=16, init_std=0.3)
LORA, BETA = LoraConfig(3, ("all",), zero_start=False), 0.3
CODES = ModelConfig(37, 64, 128, 2, 4, 2, head_dim=32, max_seq_len=16, init_std=0.3)  # in NF4, for two ranks
DRAW = torch.Generator().manual_seed(0)
TOKENS, TARGETS = torch.randint(37, (2, 8, 10), generator=DRAW)  # four pairs
TARGETS[torch.rand(8, 10, generator=DRAW) < 0.4] = IGNORE


def log_likelihoods(model):
    log_p = F.log_softmax(model(TOKENS), dim=-1)
    counted = TARGETS != IGNORE
    return (log_p.gather(-1, TARGETS.clamp(min=0)[..., None])[..., 0] * counted).sum(1)


def expected():
    """Two models, and the loss as the paper writes it."""
    policy, frozen = (Transformer(SHAPE, seed=2, dtype=torch.float64, attention=dense) for _ in range(2))
    attach(policy, LORA, seed=2)
    of_policy, of_frozen = log_likelihoods(policy), log_likelihoods(frozen).detach()
    margins = (of_policy[::2] - of_policy[1::2]) - (of_frozen[::2] - of_frozen[1::2])
    loss = -F.logsigmoid(BETA * margins).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in adapter_parameters(policy).items()}


def found(strategy, accumulate=1, shape=SHAPE):
    start = Start(lora=LORA, qlora=shape is CODES)
    model = strategy.build(shape, seed=2, start=start, dtype=torch.float64, attention=dense)
    module = strategy.wrap(model)
    strategy.updater(module, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    rows = (each.tensor_split(strategy.world_size)[strategy.rank] for each in (TOKENS, TARGETS))
    batches = [Microbatch(*each) for each in zip(*(x.split(len(x) // accumulate) for x in rows), strict=True)]
    batches, loss, pairs = Preference(BETA, module, strategy.model).weighted(batches)
    strategy.forward_backward(module, batches, strategy.loss_divisor(pairs))
    strategy.prepare_gradients()
    return (strategy.sum(loss) / strategy.sum(pairs)).item(), strategy.gradients()


def check(loss, gradients):
    expected_loss, expected_gradients = expected()
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_formula(accumulate):
    check(*found(SingleDevice(), accumulate))


def on_ranks(group, layout, make, is_in_codes=False):
    with make(group, layout) as strategy:
        return found(strategy, layout.accumulate, CODES if is_in_codes else SHAPE)


BACKENDS = [make_strategy, pytest.param(make_nccl_like_strategy, marks=pytest.mark.full)]
LAYOUTS = [
    ParallelConfig(dp=2, zero=2),
    ParallelConfig(dp=2, zero=3),
    ParallelConfig(tp=2, sequence=True),
    ParallelConfig(pp=2, accumulate=2),
]


@pytest.mark.parametrize("make", BACKENDS, ids=["gloo", "nccl_like"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_so_are_those_of_ranks(layout, make):
    check(*launch(partial(on_ranks), layout.world_size, layout, make)[0])


def test_beside_codes_ranks_compute_what_one_process_does():
    """The reference, too: adapters that are switched off leave codes that are cut over ranks."""
    loss, gradients = launch(on_ranks, 2, ParallelConfig(tp=2, sequence=True), make_strategy, True)[0]
    right, expected = found(SingleDevice(), shape=CODES)
    assert loss == pytest.approx(right, rel=1e-12) and gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14, msg=name)
