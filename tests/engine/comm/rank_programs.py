"""What ranks run in the tests of launch: programs that go wrong in every way, and some that only look so."""

import ctypes
import os
import signal
import sys
import threading
import time

import psutil
import torch

from minillm.comm import PeerLostError, launch
from minillm.comm.diagnostics.flight_recorder import FINISHED


def rank_and_sum(group):
    return group.rank, group.all_reduce(torch.ones(3)).tolist()


def nothing(group):
    return None


# Failures.


def raise_alone(group, who, how="idle"):
    """Rank `who` raises while the others are busy in the way that `how` says."""
    x = torch.ones(1000)
    if group.rank == who:
        time.sleep(0.1)
        raise KeyError("the cause is here")  # source line
    if how == "collective":
        group.all_reduce(x)
    elif how == "ring":
        for _ in range(10_000):
            group.exchange(send=(x, (group.rank + 1) % group.world_size), recv=(x, (group.rank - 1) % group.world_size))
    elif how == "async":
        group.all_reduce(x, async_op=True).wait()
    elif how == "objects":
        group.gather_objects(group.rank)
    elif how == "wrapped":
        try:
            group.all_reduce(x)
        except PeerLostError as error:
            raise ValueError("not the cause") from error
    elif how == "spin":
        while True:
            pass
    return "done"


def raise_both(group):
    if group.rank == 1:
        raise ValueError("first")
    time.sleep(0.15)
    raise ValueError("second")


def end(group, who, how):
    """Rank `who` ends in the way `how` says while the others wait for it."""
    if group.rank == who:
        if how == "exit 0":
            os._exit(0)
        if how == "exit 7":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(3)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    group.barrier()


def die_last(group):
    """Rank 1 is killed when rank 0 is done and waits for it to leave together."""
    while group.rank and group.world.recorder.state(0)[1] != FINISHED:
        time.sleep(0.01)
    if group.rank:
        os.kill(os.getpid(), signal.SIGKILL)


class Stubborn(Exception):
    """Neither pickles nor says what it is."""

    def __init__(self, lock):
        super().__init__(lock)

    def __str__(self):
        raise RuntimeError("no text")


class NeedsTwo(Exception):
    """Pickles, but cannot be made again from its text."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raise_stubborn(group):
    raise Stubborn(threading.Lock())


def raise_needs_two(group):
    raise NeedsTwo(1, 2)


def return_a_lock(group):
    return threading.Lock() if group.rank == 1 else "fine"


# Hangs.


def hang(group, how):
    x, n, r = torch.ones(4, 2), group.world_size, group.rank
    if how == "collective":  # rank 1 never enters
        if r == 1:
            while True:
                time.sleep(0.01)  # waiting for nothing
        group.all_reduce(x)
    elif how == "cycle":  # everybody receives first
        group.recv(x, (r + 1) % n)
        group.send(x, (r - 1) % n)
    elif how == "subgroup":
        pair = group.subgroup([0, 2], "pair")
        if r == 0:
            pair.all_gather(x)
    elif how == "returned":  # rank 2 has gone home
        if r != 2:
            group.broadcast(x)
    elif how == "async":  # the handle is never answered
        if r == 0:
            group.all_reduce(x, async_op=True).wait()
        else:
            group.recv(x, 0)
    elif how == "stopped":  # while the other gives signs of life
        if r == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        talk_slowly(group, 60)
    elif how == "stopped inside":
        if r == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            group.recv(x, 0)
            group.all_reduce(x)
        else:
            group.send(x, 1)
            time.sleep(60)
    elif how == "lock":
        if r == 1:
            ctypes.PyDLL(None).sleep(60)
        group.all_reduce(x)
    elif how == "other order":
        group.barrier() if r else group.gather_objects(1)
    elif how == "spin":
        while True:
            pass


def interrupt_oneself(group):
    """As a Ctrl-C that reaches one rank: the launcher decides what becomes of it."""
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return group.all_reduce(torch.tensor([1.0 + group.rank])).item()


def slow_but_alive(group, seconds):
    """Rank 0 returns at once; the others go on for longer than the timeout, with signs of life."""
    pair = group.subgroup([1, 2], "pair")
    for _ in range(round(seconds / 0.05) if group.rank else 0):
        time.sleep(0.05)
        pair.barrier()
    return group.rank


def talk_slowly(group, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)
        print("working")
    return True


# Output, arguments, environment.


def talk(group, lines):
    for i in range(lines):
        print(f"line {i} of {group.rank} " + "x" * (i % 90))
    print("to stderr", group.rank, file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.printf(b"from C %d\n", group.rank)
    os.write(1, b"raw\n")
    print("no newline at the end", end="")


def talk_and_die(group):
    ctypes.CDLL(None).printf(b"last words in C %d\n", group.rank)
    print("last words in Python")
    os.kill(os.getpid(), signal.SIGKILL)


def speak_oddly(group):
    print("é 漢 \u2028 x")
    os.write(1, b"\xff\xfe broken\n")
    print("a\rb\rc")
    print("y" * 200_000)


def big(group, x):
    return x + group.rank


def environment(group, name):
    return os.environ.get(name), os.getcwd(), os.environ["RANK"], os.environ["MASTER_ADDR"]


def nested(group):
    return launch(rank_and_sum, 2)


def leave_handle(group):
    """Start something and return without waiting for it."""
    group.all_reduce(torch.ones(1000), async_op=True)
    return group.rank


LEFT_S = 1200


def leave_thread(group):
    threading.Thread(target=time.sleep, args=(LEFT_S,)).start()
    return group.rank


def done_turns_true(group):
    """`done` is False before the message was sent, True after, without anybody calling `wait`."""
    x = torch.full((3,), float(group.rank))
    if group.rank == 0:
        group.barrier()
        time.sleep(0.3)
        handle = group.send(x, 1, async_op=True)
        early = False
    else:
        handle = group.recv(x, 0, async_op=True)
        early = handle.done()
        group.barrier()
    until = time.monotonic() + 20
    while not handle.done() and time.monotonic() < until:
        time.sleep(0.01)
    late = handle.done()
    handle.wait()
    collective = group.all_reduce(torch.ones(3), async_op=True)
    while not collective.done() and time.monotonic() < until:
        time.sleep(0.01)
    return early, late, x.tolist(), collective.done()


def listening(group):
    """Addresses on which this rank listens, and its launcher."""
    launcher = psutil.Process(os.getppid()).parent()  # the fork server is in between
    found = [c for p in (psutil.Process(), launcher) for c in p.net_connections("tcp")]
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
