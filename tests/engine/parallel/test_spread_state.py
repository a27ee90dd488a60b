"""A run that is stopped and goes on in any other layout is the run that never stopped: weights, moments and masters."""

import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from minillm.comm import launch
from minillm.model import ModelConfig, dense
from minillm.parallel import FullyShard, ZeroOptimizer
from minillm.parallel.sharding.full_state import full_state, load_full
from minillm.parallel.sharding.state import LocalState
from minillm.train import SingleDevice
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

SHARDED = [ParallelConfig(dp=n, zero=zero) for n in (4, 3, 2, 1) for zero in (3, 2, 1, 0)]
SPLIT = [
    ParallelConfig(dp=2, tp=2, sequence=True, zero=1),
    ParallelConfig(dp=2, pp=2, accumulate=2, zero=1),
    ParallelConfig(pp=2, tp=2, accumulate=2),
    ParallelConfig(dp=2, pp=2, accumulate=2, schedule="zero_bubble_v"),  # a tied embedding twice on one rank
]
FREEZE = ("embedding.weight", "blocks.0.*", "blocks.2.mlp.*", "norm.weight")
KINDS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),  # nothing but a tensor
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),  # has its state before the first step
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),  # two numbers per parameter
}


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    layouts: tuple[ParallelConfig, ...]
    kind: str
    frozen: tuple[str, ...]
    master: bool

    def make(self, named):
        groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
        for _, parameter in named:
            if parameter.requires_grad:
                groups[len(getattr(parameter, "whole_shape", parameter.shape)) == 1]["params"].append(parameter)
        return KINDS[self.kind](groups)


@st.composite
def cases(draw):
    hidden, intermediate, vocab = (draw(st.integers(low, high)) for low, high in ((5, 11), (3, 13), (11, 31)))
    model = ModelConfig(
        vocab, hidden, intermediate, 4, 2, draw(st.sampled_from([1, 2])), head_dim=4, max_seq_len=8,
        tie_embeddings=draw(st.booleans()), qkv_bias=draw(st.booleans()), init_std=0.3,
    )  # fmt: skip
    layouts = draw(st.lists(st.sampled_from([*SPLIT, *SHARDED]), min_size=3, max_size=4))
    frozen = draw(st.lists(st.sampled_from(FREEZE), unique=True, max_size=2))
    kinds = ["adamw", *sorted(KINDS)]
    return Case(
        model, tuple(layouts), draw(st.sampled_from(kinds)), tuple(frozen), draw(st.sampled_from([False] * 3 + [True]))
    )


class Going:
    """A run in one layout: model, what wraps it, what steps it."""

    def __init__(self, case, form, accumulate=1):
        self.case, self.form, self.accumulate = case, form, accumulate
        self.model = form.build(
            case.model, seed=0, dtype=torch.bfloat16 if case.master else torch.float64, attention=dense
        )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, each) for each in case.frozen))
        self.module = form.wrap(self.model, case.master)
        self.updater = form.updater(self.module, case.make, case.master)

    def step(self, number):
        draw = torch.Generator().manual_seed(number)
        tokens, targets = torch.randint(self.case.model.vocab_size, (2, 12, 6), generator=draw)
        mine = [x[self.form.rank :: self.form.world_size].tensor_split(self.accumulate) for x in (tokens, targets)]
        loss_divisor = self.form.loss_divisor(torch.tensor(float(tokens.numel() // self.form.world_size)))
        self.form.forward_backward(self.module, [(t, w, None) for t, w in zip(*mine, strict=True)], loss_divisor)
        self.form.prepare_gradients()
        self.updater.step()
        self.updater.zero_grad()

    def local(self):
        return LocalState(self.updater, self.form, torch.bfloat16 if self.case.master else None)

    def saved(self):
        return copy.deepcopy(full_state(self.local(), self.form.group))

    def load(self, state):
        load_full(self.local(), state["optimizer"], state["model"])


def apart(found, wanted):
    """The largest difference between two whole states; names of masters that both have."""
    assert found["model"].keys() == wanted["model"].keys()
    pairs = [(found["model"][name], wanted["model"][name]) for name in wanted["model"]]
    mine, theirs = found["optimizer"], wanted["optimizer"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert {p: entry.keys() for p, entry in mine["state"].items()} == {p: e.keys() for p, e in theirs["state"].items()}
    pairs += [(value, theirs["state"][p][key]) for p, entry in mine["state"].items() for key, value in entry.items()]
    pairs += [(mine["masters"][name], theirs["masters"][name]) for name in mine["masters"].keys() & theirs["masters"]]
    pairs = [(torch.as_tensor(a).double().cpu(), torch.as_tensor(b).double().cpu()) for a, b in pairs]
    assert all(a.shape == b.shape for a, b in pairs)
    return max((a - b).abs().max().item() for a, b in pairs)


def relay(group, chosen):
    """Each layout takes two steps, with a stop between them that its ranks outlive alone, and hands its state on.
    Returns (case, how far a state is off once loaded, how far all is from one process in the end)."""
    groups = {n: group.subgroup(list(range(n)), f"first {n}") for n in range(1, group.world_size)} | {4: group}
    results = []
    for case in chosen:
        state, loaded, steps = None, [], 0
        for layout in case.layouts:
            if group.rank < layout.world_size:
                run = Going(case, make_strategy(groups[layout.world_size], layout), layout.accumulate)
                if state:
                    run.load(state)
                    loaded.append(apart(run.saved(), state))
                run.step(steps)
                own = copy.deepcopy((run.local().tensors, run.local().numbers(of_empty_parts=True)))
                run.step(steps + 99)
                run.local().load_parts(*own)
                run.step(steps + 1)
                state = run.saved()
            state, steps = group.gather_objects(state)[0], steps + 2
        through = Going(case, SingleDevice())
        for number in range(steps):
            through.step(number)
        results.append((case, max([0.0, *loaded]), apart(state, through.saved())))
    return results


@pytest.mark.full
def test_stopped_in_any_layout_and_gone_on_in_any_other():
    chosen = []

    @settings(max_examples=8, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(cases())
    def collect(case):
        chosen.append(case)

    collect()
    for rank in launch(relay, 4, chosen, timeout=180):
        for case, loaded, off in rank:
            assert loaded == 0, case
            assert case.master or off < 1e-9, case


class Scaled(nn.Module):
    """A parameter without dimensions, whose moments look like a count of steps."""

    def __init__(self, seed=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).double())
        self.gain = nn.Parameter(torch.tensor(0.5 + seed).double())

    def forward(self, x):
        return ((x @ self.weight.T).tanh() * self.gain).square().sum()


def in_stages(group, seed):
    """(model, optimizer) of ZeRO stage 1 and of stage 3."""
    make = lambda named: torch.optim.NAdam([p for _, p in named], lr=0.01)  # noqa: E731
    one, three = Scaled(seed), FullyShard(Scaled(seed), group, blocks=[])
    return [(one, ZeroOptimizer(one, group, 1, make=make)), (three, three.optimizer(make))]


def scalars(group):
    """Four steps, and two and two with a new start between; then what is said of states that do not fit."""
    x, results = torch.linspace(-1, 1, 12).double().view(4, 3), []
    for (model, optimizer), (other, again), (whole, through) in zip(
        in_stages(group, 0), in_stages(group, 1), in_stages(group, 0), strict=True
    ):
        for number in range(4):
            if number == 2:
                other.load_state_dict(copy.deepcopy(model.state_dict()))
                again.load_state_dict(optimizer.state_dict())
                model, optimizer = other, again
            for each, stepped in ((model, optimizer), (whole, through)):
                each(x * (number + 1)).backward()
                stepped.step()
                stepped.zero_grad()
        found, wanted, state = model.state_dict(), whole.state_dict(), optimizer.state_dict()
        off = max((found[name] - wanted[name]).abs().max().item() for name in wanted)
        groups = state["param_groups"]
        bad = [
            {"state": {**state["state"], 0: {**state["state"][0], "exp_avg": torch.ones(3, 5)}}},
            {"masters": {"weight": torch.ones(7)}},
            {"names": state["names"][:1]},
            {"param_groups": [{**groups[0], "params": [0]}, {**groups[0], "params": [1]}]},
        ]
        results.append((off, [_said(optimizer, state | change) for change in bad]))
    return results


def _said(optimizer, state):
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state)
    return str(error.value)


def test_a_parameter_without_dimensions_and_states_that_do_not_fit():
    other = "this optimizer state is of another model"
    for rank in launch(scalars, 3):
        for off, said in rank:
            assert off < 1e-9  # torch counts NAdam's momentum product in float32, and goes on in the parameter's dtype
            assert said == [
                f"{other}: its optimizer/exp_avg/weight is [3, 5], not [5, 3]",
                f"{other}: its master/weight is [7], not [5, 3]",
                f"{other} or another make(): it has None in place of gain.",
                f"{other} or another make(): its groups have [1, 1] parameters, [2] here.",
            ]
