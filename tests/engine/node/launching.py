"""Ranks on a pretended node: `launch(on_node(program), n)`, and `all_launches_on_a_node` for programs that launch."""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from minillm.comm.launch import worker
from tests.engine.comm.nccl_like import RuleBroken, unwaited
from tests.engine.node import streams
from tests.engine.node.buffers import check_buffers
from tests.engine.node.node import Node, pretend_node
from tests.engine.node.order import Entry, stuck
from tests.engine.node.process_group import NodeGroup


class OnNode:
    """A program for `launch`. A rank is on the node as soon as it has unpickled this, before it looks for its device.

    makes_on_gpu: tensors that the program makes without `device=` are on its GPU, as after torch.set_default_device.
    how: of `Node`."""

    def __init__(self, program: Callable, makes_on_gpu: bool, how: dict[str, Any]) -> None:
        self.program, self.makes_on_gpu, self.how = program, makes_on_gpu, how

    def __call__(self, group: Any, *args: Any) -> Any:
        raise ValueError("a program on a node runs in ranks of `launch`")

    def __reduce__(self) -> tuple:
        return _arrive, (self.how, self.makes_on_gpu, self.program)


def on_node(program: Callable, makes_on_gpu: bool = False, **how: Any) -> OnNode:
    return OnNode(program, makes_on_gpu, how)


def _arrive(how: dict[str, Any], makes_on_gpu: bool, program: Callable) -> Callable:
    stack = contextlib.ExitStack()
    node = stack.enter_context(pretend_node(**how))
    node.stack = stack  # as long as the process lives

    def run(group: Any, *args: Any) -> Any:
        node.makes_on = group.device if makes_on_gpu else None
        result = program(group, *args)
        check_all(node)
        return result

    return run


def check_all(node: Node) -> None:
    """At the end of a rank's program."""
    node.finish()
    for group in node.process_groups:
        group.settle()
    if left := unwaited():
        raise RuleBroken(f"{len(left)} operations were never waited for: {', '.join(left[:5])}")
    check_buffers(node)
    if node.process_groups:
        check_order(node)


def check_order(node: Node, wait_s: float = 60) -> None:
    """RuleBroken if the ranks' launches could block each other. Every rank calls it."""
    if text := told_stuck(wait_s):
        raise RuleBroken(text)


def told_stuck(wait_s: float) -> str:
    """What `stuck` says of all ranks; of those that tell in time."""
    node, store, rank = streams.NODE, dist.distributed_c10d._get_default_store(), dist.get_rank()
    key = f"launched since {node.process_groups[0].label} by rank " if node.process_groups else "launched by rank "
    store.set(f"{key}{rank}", pickle.dumps(node.launched))
    told: dict[int, list[Entry]] = {rank: node.launched}
    for other in range(dist.get_world_size()):
        if other == rank:
            continue
        with contextlib.suppress(dist.DistStoreError, RuntimeError):
            store.wait([f"{key}{other}"], timedelta(seconds=wait_s))
            told[other] = pickle.loads(store.get(f"{key}{other}"))
    return stuck(told)


def _stuck_in(group: NodeGroup) -> str:
    return "\n" + told_stuck(wait_s=5)


NodeGroup.stuck = _stuck_in


@contextlib.contextmanager
def all_launches_on_a_node(force: bool = True, **how: Any) -> Iterator[list[Callable]]:
    """Inside, whatever this process launches runs on a node: for programs that call `launch` themselves. Yields what
    they have handed to it so far.

    force: on its GPUs, whatever device the program asks for. how: of `on_node`."""
    plain, launched = worker.Job, []

    def job(function: Callable, *args: Any) -> Any:
        launched.append(function)
        made = plain(on_node(function, **how), *args)
        return replace(made, device="cuda") if force else made

    worker.Job = job
    try:
        yield launched
    finally:
        worker.Job = plain


@contextlib.contextmanager
def whole_machine() -> Iterator[None]:
    """This process and all ranks that it launches are on a node; programs run on the device that they ask for."""
    with all_launches_on_a_node(force=False), pretend_node():
        yield
