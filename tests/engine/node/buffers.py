"""Buffers that minillm's backend keeps behind the stream-ordered wait for their collective.

A GPU is usually far behind its host, so a buffer that is kept until the device has been *seen* to be done is kept for
many collectives. After `wait` on the launching stream nothing needs it: memory that is freed then is used again only
behind the collective. Allowed is what the latest collective of a group still holds.
"""

import gc
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from minillm.comm.backends.native import NativeBackend
from minillm.comm.operation import Operation, Work
from tests.engine.node.process_group import Handle, Use
from tests.engine.node.races import NodeError

if TYPE_CHECKING:
    from tests.engine.node.node import Node

_THROUGH = (list, tuple, dict, deque, set)


def check_buffers(node: "Node") -> None:
    """NodeError if a backend keeps memory of more collectives than its latest one, though all have been waited for."""
    users: dict[int, Use] = {}
    for group in node.process_groups:
        users |= {id(allocation): use for use in group.recent if use.waited for allocation in use.allocations}
    for backend in [each for each in gc.get_objects() if type(each) is NativeBackend]:
        works: dict[int, tuple[str, int]] = {}  # of each collective its text and the bytes
        for x in _tensors(backend):
            allocation = node.memory.of(x)
            if id(allocation) in users and allocation.num_bytes:
                use = users[id(allocation)]
                works[id(use)] = use.text, works.get(id(use), ("", 0))[1] + allocation.num_bytes
        if len(works) > 1:
            texts = sorted({text for text, _ in works.values()})
            raise NodeError(
                f"buffers are kept behind their wait: the backend of a group holds "
                f"{sum(num_bytes for _, num_bytes in works.values())} bytes of {len(works)} collectives that have all "
                f"been waited for: {', '.join(texts[:3])}"
            )


def _tensors(root: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Those that are reachable from the backend through its own launches, containers and closures."""
    seen, front = set(), [root]
    for _ in range(depth):
        following = []
        for each in front:
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, torch.Tensor):
                yield each
            elif isinstance(each, _THROUGH):
                following += each.values() if isinstance(each, dict) else each
            elif isinstance(each, Handle):
                following += [*each.inputs, *each.outputs]
            elif isinstance(each, (NativeBackend, Work)) or type(each).__module__.startswith("minillm.comm.backends"):
                following += vars(each).values()
            elif callable(each) and getattr(each, "__closure__", None):
                following += [cell.cell_contents for cell in each.__closure__ if _is_set(cell)]
            elif isinstance(each, Operation):
                continue
        front = following


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
