"""What the backend that keeps NCCL's rules says where a program breaks one.

The oracle runs on it in tests/engine/oracle/test_oracle_layouts.py.
"""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from minillm.comm import RankError, Work, launch
from minillm.equivalence import CASES, compare
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.comm.nccl_like import nccl_like_group, on_nccl_like

# What breaks a rule is told in a sentence.


def says(program, *words: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(on_nccl_like(program), 2, timeout=60)
    for word in words:
        assert word in str(caught.value), caught.value


def missing_wait(group):
    x = torch.ones(3)
    work = group.all_reduce(x, async_op=True)
    seen = x.clone()
    work.wait()
    return seen.isnan().all().item(), group.all_gather(torch.tensor([group.rank]), async_op=True).wait().tolist()


def test_outputs_hold_garbage_until_waited_for() -> None:
    assert launch(on_nccl_like(missing_wait), 2) == [(True, [0, 1])] * 2


def never_waited(group):
    group.all_reduce(torch.ones(3), async_op=True)
    group.barrier()


def test_an_operation_nobody_waits_for() -> None:
    says(never_waited, "1 operations were never waited for: all_reduce(SUM) [3] float32")


def other_order(group):
    calls = [lambda: dist.all_reduce(torch.ones(3), group=group.process_group, async_op=True)]
    calls.append(lambda: dist.broadcast(torch.ones(3), 0, group.process_group, async_op=True))
    for work in [call() for call in (calls if group.rank == 0 else reversed(calls))]:
        work.wait()


def test_another_order_on_one_rank() -> None:
    says(other_order, "ranks run different operations", "all_reduce(SUM) [3] float32", "broadcast(root=0) [3] float32")


def changed_too_early(group):
    x = torch.ones(3)
    work = group.all_gather(x, async_op=True)
    x += 1
    work.wait()


def test_an_input_that_changes_too_early() -> None:
    says(changed_too_early, "an input of all_gather [3] float32 changed before the operation was waited for")


def written_too_early(group):
    x = torch.ones(3)
    work = group.all_reduce(x, async_op=True)
    x[0] = 5
    work.wait()


def test_an_output_that_is_written_too_early() -> None:
    says(written_too_early, "of all_reduce(SUM) [3] float32 changed before the operation was waited for")


def from_a_pool(group):
    group.all_reduce(torch.ones(1))
    with ThreadPoolExecutor(1, "pool") as pool:
        pool.submit(group.all_reduce, torch.ones(3)).result()


def test_a_call_from_another_thread() -> None:
    says(from_a_pool, "all_reduce(SUM) [3] float32 comes from thread 'pool_0', earlier operations from 'MainThread'")


def both_send_first(group):
    peer, pg = 1 - group.rank, group.process_group
    works = [dist.isend(torch.ones(2), group=pg, group_dst=peer), dist.irecv(torch.ones(2), group=pg, group_src=peer)]
    for work in works:
        work.wait()


def test_unbatched_messages_in_the_wrong_order() -> None:
    says(both_send_first, "rank 0 has send [2] torch.float32", "rank 1 has send [2] torch.float32", "wait for ever")


def rendezvous(group):
    x, pg = torch.full((2,), float(group.rank)), group.process_group
    if group.rank == 0:
        dist.isend(x, group=pg, group_dst=1).wait()
    else:
        dist.irecv(x, group=pg, group_src=0).wait()
    return x.tolist()


def test_unbatched_messages_in_order() -> None:
    assert launch(on_nccl_like(rendezvous), 2) == [[0.0, 0.0]] * 2


# The same mistakes inside a training step.


def forgetful(group, layout):
    """Its asynchronous all-reduces are launched, and taken for done."""
    kind = copy.copy(nccl_like_group(group))
    reduce = kind.all_reduce

    def all_reduce(x, op="sum", async_op=False):
        result = reduce(x, op, async_op)
        return Work(lambda: x) if async_op else result

    kind.all_reduce = all_reduce
    return make_strategy(kind, layout)


def test_a_reducer_that_does_not_wait() -> None:
    (row,) = compare(ParallelConfig(dp=2), {"plain": CASES["plain"]}, steps=1, strategy=forgetful)
    assert not row.ok and row.worst_gradient == math.inf


def in_a_thread(group):
    """As asynchronous collectives were once run: synchronous ones in a thread of the group."""
    group.all_reduce(torch.ones(1))
    with ThreadPoolExecutor(1, "minillm") as pool:
        works = [pool.submit(dist.all_reduce, torch.ones(n), group=group.process_group) for n in (2, 3)]
        for work in works:
            work.result()


def test_collectives_in_a_helper_thread() -> None:
    says(in_a_thread, "comes from thread 'minillm_0'")
