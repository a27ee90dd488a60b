"""One training step of each layout given, on a device that is not the CPU: `python device_program.py FAULT LAYOUT ...`.

The device is one that torch lets Python register; its tensors are fake: they have a shape, a dtype and a device but no
values. An operation that mixes devices raises, and so does every read of a value by the host, which on a GPU would
wait for the device. The ranks beside this one are torch's fake process group, which answers with the shapes asked for.
FAULT: "none", or what is planted: "mix", "read".
"""

import sys
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from minillm.comm import Group
from minillm.comm.backends.native import NativeBackend
from minillm.comm.diagnostics.flight_recorder import FlightRecorder
from minillm.comm.world import World
from minillm.equivalence import Batch, cases_of
from minillm.equivalence.oracle import _backward, _sgd
from minillm.model import dense
from minillm.parallel.sharding.placement import clip_, gradients_of
from minillm.parallel.sharding.sharded_gradient import ShardedGradient
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import SingleDevice

_setup_privateuseone_for_python_backend("gpu")
DEVICE = torch.device("gpu:0")


def _apply(self: nn.Module, fn, recurse: bool = True) -> nn.Module:
    """As torch's, which cannot swap fake parameters in place."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in self.modules():
        for key, p in module._parameters.items():
            if p is not None:
                moved[p] = moved.get(p) or nn.Parameter(fn(p.detach()), p.requires_grad)
                module._parameters[key] = moved[p]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else fn(buffer)
    return self


def make_group(world_size: int) -> Group:
    dist.Backend.backend_capability["fake"].append(DEVICE.type)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    nn.Module._apply = _apply
    NativeBackend.gather_objects = lambda self, operation, value: [value] * self.world_size
    ShardedGradient.of = staticmethod(lambda gradient, *_: gradient)  # one subclass of Tensor cannot wrap another
    with tempfile.NamedTemporaryFile() as file:
        world = World(0, DEVICE, FlightRecorder(file.name, [0]), [0], 30.0)
    return Group(world, dist.group.WORLD, list(range(world_size)), "world")


def step(group: Group, layout: ParallelConfig) -> str:
    """The type of the device that the gradient's norm is on, when all is done."""
    case = cases_of(layout)["tied"]
    strategy = make_strategy(group, layout)
    with FakeTensorMode():
        model = strategy.build(case.config, seed=0, dtype=torch.float32, attention=dense, device=DEVICE)
        for p in model.parameters():  # a fake tensor's attributes go where the parameter's own go: not "meta"
            p.fake_device = DEVICE
        module = strategy.wrap(model)
        updater = strategy.updater(module, partial(_sgd, lr=0.1))
        tokens = torch.zeros(case.batch.tokens.shape, dtype=torch.long, device=DEVICE)
        weights = torch.ones(tokens.shape, device=DEVICE)
        _backward(strategy, module, Batch(tokens, tokens, weights), layout.accumulate)
        strategy.prepare_gradients()
        norm = strategy.grad_norm(updater.parameters)
        clip_(gradients_of(updater.parameters), norm, 1.0)
        updater.step()
        updater.zero_grad()
    return norm.device.type


def plant(fault: str) -> None:
    sound = SingleDevice.loss_divisor
    if fault == "mix":
        SingleDevice.loss_divisor = lambda self, weight: sound(self, weight) * torch.ones(1)
    if fault == "read":
        SingleDevice.loss_divisor = lambda self, weight: sound(self, weight) * weight.item()


def main(fault: str, *layouts: str) -> None:
    plant(fault)
    chosen = [ParallelConfig(**eval(f"dict({layout})")) for layout in layouts]
    group = make_group(chosen[0].world_size)
    for layout in chosen:
        print(f"{layout}: {step(group, layout)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
