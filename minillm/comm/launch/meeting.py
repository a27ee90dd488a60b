"""Where ranks meet: a store of keys and values, in this process's launcher, torchrun's agent or rank 0."""

import functools
import os
import secrets
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minillm.comm.errors import PeerLostError

MEET_S = 300.0  # until the last rank of all has loaded what it imports and has come to the store
POLL_S = 0.01


@functools.cache
def meeting_place() -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, in which ranks exchange their addresses. An elastic agent's store keeps
    what the ranks before a restart have written, so it is used under a prefix that is new."""
    store, rank, world_size = next(rendezvous("env://"))
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MINILLM_RANK" not in os.environ
    return dist.PrefixStore(agree_on_name(store, rank, world_size), store) if is_agents else store


def agree_on_name(store: dist.Store, rank: int, world_size: int, wait_s: float = MEET_S) -> str:
    """A name that no earlier ranks have used in the store: rank 0 draws it and answers each rank's own question.

    Questions of earlier ranks are answered as well; those answers are not read. PeerLostError if a rank is missing."""
    question, give_up_at = secrets.token_hex(8), time.monotonic() + wait_s
    if rank:
        store.set(f"question {rank}", question)
        answered = _wait_for(lambda: store.check([f"answer {question}"]), give_up_at)
        if not answered:
            raise PeerLostError(f"rank {rank} of {world_size} has not heard from rank 0 for {wait_s:g} s: it has gone")
        name = store.get(f"answer {question}").decode()
        store.set(f"{name} {rank}", "")
        return name
    name, missing = question, set(range(1, world_size))

    def all_have_it() -> bool:
        for other in list(missing):
            if store.check([f"question {other}"]):
                store.set(f"answer {store.get(f'question {other}').decode()}", name)
            if store.check([f"{name} {other}"]):
                missing.discard(other)
        return not missing

    if not _wait_for(all_have_it, give_up_at):
        lost = ", ".join(map(str, sorted(missing)))
        raise PeerLostError(f"rank 0 of {world_size} has waited {wait_s:g} s for ranks {lost}: they have gone")
    return name


def _wait_for(happened: Callable[[], bool], give_up_at: float) -> bool:
    while not happened():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(POLL_S)
    return True
