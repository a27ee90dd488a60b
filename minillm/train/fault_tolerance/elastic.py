"""A run whose number of ranks changes: the same windows of text in the same steps, whoever computes them.

    windows of a step = data-parallel ranks · batch_size · accumulate        constant, so accumulate changes

    4 ranks · 2 · 3  ->  one is lost  ->  3 ranks · 2 · 4  ->  it comes back  ->  4 ranks · 2 · 3

A step takes the next windows of one stream that knows nothing of ranks (data/sampler.py), so with their number constant
no window is repeated or skipped, and learning rate and loss mean the same as before. torchrun's elastic agent restarts
the processes; each finds the run that its job has begun and goes on. With a number that does not divide they wait for
nodes to come or go, as failing would use up the agents' restarts within a minute:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 3:4 --nproc-per-node 8 --max-restarts 9 \\
        --rdzv-backend c10d --rdzv-id night --rdzv-endpoint HOST:29400 -m -- minillm train --run night

The variable matters for nodes that join later: without it the agents of torch 2.13 publish the address of their shared
store in the first round only, and a new agent waits for it until it gives up.
"""

import os

import psutil

NO_ID = ("", "none")  # what torchrun says where a job was given no name


class DoesNotDivide(ValueError):
    """A number of ranks over which the windows of a step do not divide."""


def accumulate_for(windows: int, batch_size: int, dp: int) -> int:
    """How many microbatches each of `dp` ranks computes for a step of `windows`. Raises DoesNotDivide if that is not a
    whole number."""
    accumulate, rest = divmod(windows, dp * batch_size)
    if rest or accumulate == 0:
        possible = ", ".join(map(str, possible_ranks(windows, batch_size)))
        raise DoesNotDivide(
            f"the {windows} windows of a step do not divide over {dp} data-parallel ranks with --batch-size "
            f"{batch_size}: go on with {possible} of them"
        )
    return accumulate


def possible_ranks(windows: int, batch_size: int) -> list[int]:
    """The numbers of data-parallel ranks that a run can go on with."""
    most = windows // batch_size
    return [dp for dp in range(1, most + 1) if windows % (dp * batch_size) == 0]


def job_id() -> str | None:
    """The name of torchrun's job (--rdzv-id), which outlives restarts; None outside or where it has none."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return None if found in NO_ID else found


def was_restarted() -> bool:
    """Whether torchrun has started these ranks again after a failure. A changed number of nodes is not counted."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def agent_began() -> float:
    """Seconds since the epoch at which torchrun's agent, which has started this rank, was started itself."""
    return psutil.Process(os.getppid()).create_time()


def may_restart() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")
