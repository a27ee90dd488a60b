"""The same script by python, by torchrun and as two nodes: equal receipts, hangs found, nothing left."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from minillm.comm.errors import PeerLostError
from minillm.comm.launch.launcher import _store
from minillm.comm.launch.meeting import agree_on_name
from minillm.comm.launch.worker import STORE_S

HERE = Path(__file__).parent
SCRIPT = str(HERE / "torchrun_program.py")
PATIENCE_S = 600  # what does not end at all is told from what a busy machine slows down


def start(folder: Path, *command: str, **environ: str) -> subprocess.Popen:
    environ |= {"PYTHONPATH": str(HERE.parents[2]), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *command]
    return subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(autouse=True)
def ends(tmp_path):
    """Ranks of a torchrun that was killed go on for ever: none may outlive a test that failed."""
    yield
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("TMPDIR", "").startswith(str(tmp_path)):
            process.kill()


def torchrun(*args: str) -> list[str]:
    return ["-m", "torch.distributed.run", *args, SCRIPT]


def nothing_left(folder: Path) -> None:
    assert not list(folder.glob("minillm-*"))
    mine = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(folder)]
    assert not psutil.wait_procs(mine, timeout=PATIENCE_S)[1]


def free_port() -> str:
    return str(_store(STORE_S).port)  # closed again at once


@pytest.mark.full
def test_receipts_are_equal_in_all_three_worlds(tmp_path) -> None:
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    commands = {
        "python": [[SCRIPT]],
        "torchrun": [torchrun("--standalone", "--nproc-per-node", "4")],
        "two nodes": [torchrun(*rendezvous), torchrun(*rendezvous)],
    }
    started = {name: [start(tmp_path, *args, "receipts") for args in commands[name]] for name in commands}
    receipts = {}
    for name, processes in started.items():
        outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
        assert all(process.returncode == 0 for process in processes), outputs
        lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("RECEIPTS ")]
        assert len(lines) == 1, outputs
        receipts[name] = json.loads(lines[0].removeprefix("RECEIPTS "))
    assert receipts["torchrun"] == receipts["python"]
    assert receipts["two nodes"] == receipts["python"]
    first, second = receipts["python"]
    assert [rank["ranks"][0] for rank in first] == [0, 1, 2, 3] and first != second
    assert all(rank["left"] == [] for rank in first + second)
    nothing_left(tmp_path)


@pytest.mark.full
def test_hangs_end_with_the_table(tmp_path) -> None:
    """By the timeout of `launch`, in any group: not after half an hour, nor after rank 1's hour of sleep."""
    rows = {"mesh": "0     all_reduce", "barrier": "0     barrier", "subgroup": "0     make group"}
    started = {how: start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "2"), how) for how in rows}
    for how, process in started.items():
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0 and "HangError: rank 0 waited too long" in err, err[-3000:]
        assert "Who waits for whom" in err
        assert [line for line in err.splitlines() if line.rstrip().endswith("rank 1") and rows[how] in line], err[
            -3000:
        ]
    nothing_left(tmp_path)


@pytest.mark.full
def test_nested_launch_is_refused_under_torchrun(tmp_path) -> None:
    process = start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "1"), "nested")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0 and "ValueError: launch was called inside a rank" in err
    nothing_left(tmp_path)


@pytest.mark.full
def test_no_thread_of_gloo_outlives_the_launch(tmp_path) -> None:
    """One that frees a tensor while Python shuts down would abort the process."""
    process = start(tmp_path, *torchrun("--standalone", "--nproc-per-node", "2"), "threads")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    seen = re.findall(r"THREADS (\[.*?\])", out)  # two ranks share the pipe: their lines may run together
    assert len(seen) == 2 and "gloo" not in "".join(seen)


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("host", [True, False])
def test_the_survivors_of_a_lost_node_name_its_ranks(host, tmp_path) -> None:
    """One of two nodes is killed: the ranks of the other end with a sentence, and without a traceback of ours. They see
    the loss itself: their timeout is an hour. host: the node that goes holds the store. Its loss ends the agent of the
    other, too, and now and then that is the first to see it and has ended its ranks before they can say a word."""
    for attempt in range(5):
        ranks, err = lose_a_node(host, tmp_path / str(attempt))
        assert f'File "{SCRIPT}", line' not in err and "HangError" not in err, err[-3000:]  # no traceback of a rank
        names = ", ".join(map(str, ranks))
        sentences = [
            line for line in err.splitlines() if f"lost ranks {names}: they ended or their machine did" in line
        ]
        if sentences or not (host and "RendezvousConnectionError" in err):
            break
    assert sentences, err[-3000:]
    before = err[: err.index(sentences[0])]  # torchrun may have said that its own store has gone
    assert not [line for line in before.splitlines() if "[rank" in line or SCRIPT in line], before


def lose_a_node(host: bool, place: Path) -> tuple[list[int], str]:
    """Two nodes that talk, of which one is killed: its ranks, and what the other one has said."""
    port = free_port()
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "lost"]
    rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    folders = [place / name for name in ("first", "second")]
    nodes = []
    for folder in folders:
        folder.mkdir(parents=True)
        nodes.append(start(folder, *torchrun(*rendezvous), "talk"))
    ranks = [sorted(talking(node) for _ in range(2)) for node in nodes]
    listening = [listens_on(int(port), node) for node in nodes]
    assert sum(listening) == 1
    lost = listening.index(host)
    for process in [*psutil.Process(nodes[lost].pid).children(recursive=True), nodes[lost]]:
        process.kill()
    nodes[lost].communicate(timeout=PATIENCE_S)
    _, err = nodes[1 - lost].communicate(timeout=PATIENCE_S)
    assert nodes[1 - lost].returncode != 0
    nothing_left(folders[1 - lost])
    return ranks[lost], err


def talking(node: subprocess.Popen) -> int:
    """The next of the node's ranks that says that it has begun."""
    line = node.stdout.readline()
    assert line.startswith("TALKS"), line or node.stderr.read()[-3000:]
    return int(line.split()[1])


def listens_on(port: int, node: subprocess.Popen) -> bool:
    connections = psutil.Process(node.pid).net_connections()
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize("place", [("127.0.0.1", None), ("no-such-machine.invalid", "29500"), ("127.0.0.1", "x")])
def test_a_store_that_nobody_holds_is_one_sentence_in_seconds(place, tmp_path) -> None:
    host, port = place
    names = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": host}
    names |= {"MASTER_PORT": port or free_port(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = start(tmp_path, SCRIPT, "talk", **names)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and f" for {STORE_S:g} s (" in err
    assert err.startswith("PeerLostError: rank 1 could not reach the store") and err.count("\n") == 1, err
    nothing_left(tmp_path)


GOING_STORE = """
import os
from minillm.comm import launch
from minillm.comm.launch import torchrun

class Store:
    def set(self, *_):
        os.write(2, b"[W TCPStore.cpp:106] [c10d] sendBytes failed, a page follows")
        raise RuntimeError("Broken pipe")

def lose(group):
    torchrun.meeting_place = Store
    raise ConnectionResetError("a peer has gone")

launch(lose, 1)
"""


@pytest.mark.full
def test_what_torch_says_about_a_store_that_goes_comes_after_the_sentence(tmp_path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    process = start(tmp_path, "-c", GOING_STORE, RANK="0", WORLD_SIZE="1", **place)
    first, page = process.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert "PeerLostError: rank 0 of 1 lost ranks" in first and page.endswith("a page follows")


def test_ranks_meet_in_a_store_that_still_holds_the_answers_of_those_before() -> None:
    """An elastic agent's store outlives its ranks: names, questions and answers of dead ranks mislead nobody."""
    store = _store(STORE_S)
    names = set()
    for world_size in (3, 3, 2, 1, 4):
        with ThreadPoolExecutor() as ranks:
            clients = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(world_size)]
            found = [ranks.submit(agree_on_name, client, rank, world_size) for rank, client in enumerate(clients)]
            (name,) = {each.result(60) for each in found}
        names.add(name)
        store.set("question 2", "of a rank that was killed while it waited")
    assert len(names) == 5
    with pytest.raises(PeerLostError, match=r"rank 0 of 3 has waited 0\.1 s for ranks 1, 2"):
        agree_on_name(dist.TCPStore("127.0.0.1", store.port, is_master=False), 0, 3, wait_s=0.1)
    with pytest.raises(PeerLostError, match=r"rank 1 of 2 has not heard from rank 0"):
        agree_on_name(dist.TCPStore("127.0.0.1", store.port, is_master=False), 1, 2, wait_s=0.1)
