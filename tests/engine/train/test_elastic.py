"""A run under torchrun's elastic agents: nodes are killed and come back, and the loss curve does not notice."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import minillm
from minillm.comm.launch.launcher import _store
from minillm.comm.launch.worker import STORE_S
from minillm.data import Tokenizer, corpus, tokenize
from minillm.train import Trainer
from minillm.train.fault_tolerance.goodput import read_goodput
from minillm.train.job import TrainingJob, saved_settings
from minillm.train.metrics import read_metrics
from minillm.train.parallel_config import ParallelConfig

TINY = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--lr", "0.003", "--steps", "2000"]
PATIENCE_S = 1800  # of the test for a rank that has to load torch on a busy machine


class Nodes:
    """Agents of one torchrun job on this machine, each with one rank."""

    def __init__(self, home, fewest, most, *arguments):
        self.home, self.running = home, []
        self.port = port = _store(STORE_S).port  # closed again at once
        self.command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{fewest}:{most}"]
        self.command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "night", "--max-restarts", "9"]
        self.command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
        self.command += ["--rdzv-conf", "last_call_timeout=10"]
        self.command += ["-m", "minillm", *arguments]

    def start(self):
        environ = os.environ | {"PYTHONPATH": str(Path(minillm.__file__).parents[1]), "TMPDIR": str(self.home)}
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see fault_tolerance/elastic.py
        log = (self.home / f"node{time.monotonic_ns()}.log").open("w")
        node = subprocess.Popen(self.command, env=environ, stdout=log, stderr=log, cwd=self.home)
        self.running.append(node)

    def has_a_host(self):
        return socket.socket().connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self, index):
        """Agent and rank at once, as when a machine loses power."""
        node = self.running.pop(index)
        if node.poll() is not None:
            return
        family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        [process.send_signal(signal.SIGSTOP) for process in family]
        [process.kill() for process in family]
        node.wait()

    def wait_for(self, what):
        give_up_at = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < give_up_at and all(node.poll() is None for node in self.running), self.logs()
            time.sleep(0.1)

    def logs(self):
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.home.glob("node*.log")))

    def end(self):
        while self.running:
            self.kill(0)


@pytest.fixture
def nodes(home):
    made = []

    def make(*arguments):
        made.append(Nodes(home, *arguments))
        return made[-1]

    yield make
    [each.end() for each in made]


def rows_of(folder):
    return [row for row in read_metrics(folder, missing_ok=True) if "loss" in row]


@pytest.mark.full
def test_four_nodes_three_nodes_four_nodes(nodes, home):
    folder = home / "runs/tiny-1"  # it has no name: the restarted ranks find it by the job's
    often = ["--batch-size", "1", "--accumulate", "3", "--save-every", "4", "--validate-every", "100000"]
    job = nodes(3, 4, *TINY, *often)
    job.start()
    job.wait_for(job.has_a_host)  # the first node holds the agents' store, and is not the one that is killed
    [job.start() for _ in range(3)]

    def steps_on(ranks, more):
        begin = len(rows_of(folder))
        job.wait_for(lambda: (rows := rows_of(folder)) and rows[-1]["ranks"] == ranks and len(rows) >= begin + more)

    steps_on(4, 6)
    job.kill(3)
    steps_on(3, 6)
    job.start()
    steps_on(4, 6)
    (folder / "stop").touch()
    for node in job.running:
        assert node.wait(PATIENCE_S) is not None
    rows = rows_of(folder)
    assert {row["ranks"] for row in rows} == {3, 4}, job.logs()
    assert [row["position"] for row in rows] == [12 * step for step in range(len(rows))]  # none twice, none skipped
    assert [each.name for each in (home / "runs").iterdir()] == ["tiny-1"]
    spent = read_goodput(folder)
    assert spent.attempts >= 3 and spent.restarting > 0 and spent.useful > 0

    alone = TrainingJob(folder, saved_settings(folder, {}, 1), ParallelConfig())
    tokens = tokenize(corpus(alone.settings["data"]), Tokenizer.load(), "train")
    with Trainer(alone.config, tokens) as trainer:
        expected = [trainer.step().loss for _ in rows]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-6)
