"""Faults planted in minillm, for ranks on the pretended node: `FAULTS[name]` says where, in which layout, and what the
node has to say. `test_node_kinds.py` lists them by kind, with those that need no ranks.
"""

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from minillm.comm import Group, ring_all_reduce
from minillm.comm.backends.native import Launch, NativeBackend, NativeWork
from minillm.comm.operation import Work
from minillm.equivalence import cases_of
from minillm.parallel.data_parallel.packing import Bucket
from minillm.parallel.data_parallel.reducer import Reducer
from minillm.parallel.fsdp.param_group import ParamGroup
from minillm.parallel.pipeline_parallel import runtime
from minillm.parallel.sharding import placement
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.single_device import SingleDevice
from tests.engine.comm.nccl_like import NcclLike
from tests.engine.node import streams
from tests.engine.node.launching import check_all
from tests.engine.node.steps import steps

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """plant: changes minillm; message: a regular expression; layout: what trains then, or `program`: what runs.

    alone: the ranks do not fail at the same place, so the fault needs a launch of its own.
    """

    plant: Callable[[Patch], None]
    message: str
    layout: ParallelConfig = field(default_factory=lambda: ParallelConfig(dp=2))
    program: Callable[[Group], None] | None = None
    alone: bool = False


def blocking_copy_in_the_norm(patch: Patch) -> None:
    sound = placement._by_kind

    def by_kind(tensors: list[torch.Tensor]) -> dict:
        torch.arange(4).to(tensors[0].device)
        return sound(tensors)

    patch.setattr(placement, "_by_kind", by_kind)


def inputs_not_kept(patch: Patch) -> None:
    sound = Launch.__init__
    patch.setattr(Launch, "__init__", lambda self, op, handles, tensors, stream: sound(self, op, handles, None, stream))


def buffers_kept_for_ever(patch: Patch) -> None:
    patch.setattr(NativeBackend, "let_go", lambda self, launch: None)


def side_stream_does_not_wait(patch: Patch) -> None:
    def side_stream(self: NativeBackend):
        self._side = self._side or torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._side)

    patch.setattr(NativeBackend, "_side_stream", side_stream)


def result_not_waited_for(patch: Patch) -> None:
    patch.setattr(Launch, "order", lambda self: None)
    patch.setattr(Launch, "order_timed", lambda self: None)


def gradient_written_while_it_is_reduced(patch: Patch) -> None:
    sound = Reducer._start

    def start(self: Reducer) -> None:
        sound(self)
        self._flats[len(self._works) - 1].mul_(2)

    patch.setattr(Reducer, "_start", start)


def bucket_read_before_it_is_reduced(patch: Patch) -> None:
    patch.setattr(Reducer, "_settle", lambda self, index: None)


def gather_not_waited_for(patch: Patch) -> None:
    sound = ParamGroup.wait

    def wait(self: ParamGroup) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Launch, "order", lambda self: None)
            inner.setattr(Launch, "order_timed", lambda self: None)
            sound(self)

    patch.setattr(ParamGroup, "wait", wait)


def message_used_before_it_is_there(patch: Patch) -> None:
    def take(self: runtime._Execution, action, part: int) -> torch.Tensor | None:
        if action.kind == "F" and part == 0:
            return self.inputs[action.microbatch]
        if action.kind == "W" or (action.kind != "F" and part == self.pipeline.last_part):
            return None
        return self.values.pop((action.kind != "F", action.microbatch, part))[0]

    patch.setattr(runtime._Execution, "take", take)


def activations_in_a_cycle(patch: Patch) -> None:
    sound = runtime._Execution.run

    def run(self: runtime._Execution) -> torch.Tensor:
        self.do = {"F": self.forward}
        return sound(self)

    patch.setattr(runtime._Execution, "run", run)


def value_read_in_the_loss(patch: Patch) -> None:
    sound = SingleDevice.loss_divisor
    patch.setattr(SingleDevice, "loss_divisor", lambda self, weight: sound(self, weight) * max(1, weight.item()))


def loss_on_the_cpu(patch: Patch) -> None:
    sound = SingleDevice.loss_divisor
    patch.setattr(SingleDevice, "loss_divisor", lambda self, weight: sound(self, weight) * torch.ones(1))


def bucket_on_the_cpu(patch: Patch) -> None:
    sound = Bucket.empty
    patch.setattr(Bucket, "empty", lambda self: sound(self).cpu())


def norm_synchronizes(patch: Patch) -> None:
    sound = placement._by_kind

    def by_kind(tensors: list[torch.Tensor]) -> dict:
        torch.cuda.synchronize()
        return sound(tensors)

    patch.setattr(placement, "_by_kind", by_kind)


def wait_forgotten(patch: Patch) -> None:
    patch.setattr(NativeWork, "wait", lambda self: self._result)


def ring_on_a_side_stream(group: Group) -> None:
    """A collective of many steps, asynchronous: it runs on a side stream."""
    for _ in range(3):
        x = torch.ones(8, device=group.device)
        work = ring_all_reduce(x.mul(2), group, async_op=True)
        more = torch.ones(8, device=group.device) * 3
        summed = work.wait()
        (summed + more).sum()
        del summed, work


def dropped_at_once(group: Group) -> None:
    """Nothing but the backend keeps the input of a collective."""
    works: list[Work] = []
    for _ in range(3):
        works.append(group.all_gather(torch.ones(8, device=group.device), async_op=True))
        torch.zeros(8, device=group.device)
    for work in works:
        work.wait()


def collective_on_the_cpu(group: Group) -> None:
    dist.all_reduce(torch.ones(3), group=group.process_group)


PIPELINE = ParallelConfig(pp=2, accumulate=2)
FAULTS = {
    "blocking copy in the norm": Fault(
        blocking_copy_in_the_norm, r"waits for cuda:\d: blocking copy to the device at .*in by_kind"
    ),
    "inputs of collectives not kept": Fault(
        inputs_not_kept, "memory freed too early: .*all_gather", program=dropped_at_once
    ),
    "buffers kept for ever": Fault(
        buffers_kept_for_ever, "buffers are kept behind their wait: .*all_gather", program=dropped_at_once
    ),
    "buffers kept from step to step": Fault(buffers_kept_for_ever, "memory grows: "),
    "side stream does not wait": Fault(
        side_stream_does_not_wait, "race between streams: .*does not wait for .*", program=ring_on_a_side_stream
    ),
    "result not waited for": Fault(
        result_not_waited_for, "race between streams: .*does not wait for", program=ring_on_a_side_stream
    ),
    "gradient written while it is reduced": Fault(
        gradient_written_while_it_is_reduced, "race between streams: mul_ .* writes .*does not wait for all_reduce"
    ),
    "bucket read before it is reduced": Fault(
        bucket_read_before_it_is_reduced, "race between streams: .*does not wait for all_reduce"
    ),
    "gather not waited for": Fault(
        gather_not_waited_for, "race between streams: .* reads .*all_gather", ParallelConfig(dp=2, zero=3)
    ),
    "message used before it is there": Fault(
        message_used_before_it_is_there, "race between streams: .*does not wait for batch", PIPELINE, alone=True
    ),
    "activations in a cycle": Fault(activations_in_a_cycle, "memory grows: ", PIPELINE),
    "value read in the loss": Fault(value_read_in_the_loss, "the host reads a value .*planted.py:.*in <lambda>"),
    "loss on the CPU": Fault(loss_on_the_cpu, r"tensors of two devices in .*on cpu"),
    "bucket on the CPU": Fault(bucket_on_the_cpu, "blocking copy|two devices|is given a tensor on cpu"),
    "norm synchronizes": Fault(
        norm_synchronizes, "torch.cuda.synchronize at .*in by_kind", ParallelConfig(dp=2, zero=1)
    ),
    "collective on the CPU": Fault(
        lambda patch: None,
        r"all_reduce.* at .*in collective_on_the_cpu is given a tensor on cpu: NCCL takes tensors of this rank's cuda",
        program=collective_on_the_cpu,
    ),
    "wait forgotten": Fault(wait_forgotten, "race between streams|never waited for", ParallelConfig(dp=2, zero=2)),
}


def said(group: Group, names: list[str]) -> dict[str, str]:
    """What each planted fault, one after the other, is told by; "" if by nothing."""
    texts = {name: _said(_fresh(group), FAULTS[name]) for name in names}
    _meet(group)
    _forget()
    return texts


def _said(group: Group, fault: Fault) -> str:
    try:
        run_with(group, fault)
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        gc.collect()
    return ""


def run_with(group: Group, fault: Fault) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        if fault.program is not None:
            fault.program(group)
        else:
            steps(group, fault.layout, cases_of(fault.layout)["plain"])
        check_all(streams.NODE)


def _fresh(group: Group) -> Group:
    """The same ranks in a group without a past."""
    _forget()
    _meet(group)
    process_group = torch.distributed.new_group(group.ranks, timeout=group.world.timeout)
    return Group(group.world, process_group, group.ranks, "fresh")


_meetings = itertools.count()


def _meet(group: Group) -> None:
    """One rank may have waited in vain for another that has raised."""
    store, meeting = dist.distributed_c10d._get_default_store(), f"meeting {next(_meetings)} of "
    store.set(meeting + str(group.rank), "")
    store.wait([meeting + str(rank) for rank in group.ranks], timedelta(seconds=100))


def _forget() -> None:
    streams.NODE.finish()
    streams.NODE.process_groups.clear()
    streams.NODE.launched.clear()
    NcclLike.made.clear()
