"""`generate --tp` and `serve --tp` as processes: their answers, their refusals, and that nothing is left of them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from minillm.__main__ import run
from minillm.cli import generate, ranks
from minillm.comm import launch
from minillm.serve import SamplingParams
from tests.engine.api.running import engine

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: requirements.txt")
SERVE = [sys.executable, "-m", "minillm", "serve", "--model", "draft", "--speculate", "none", "--port", "0"]

PATIENCE_S = 240  # three processes load torch, perhaps on a busy machine


def until(fits, what):
    end = time.monotonic() + PATIENCE_S
    while not fits():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Server:
    """A server process in a folder of its own for what is temporary."""

    def __init__(self, folder, *arguments, command=SERVE):
        self.shared_memory = set(os.listdir("/dev/shm"))
        environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *arguments],
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.folder, self.log, self.url = folder, [], None
        threading.Thread(target=lambda: self.log.extend(self.process.stdout), daemon=True).start()

    def wait(self):
        """Until it is ready."""
        until(lambda: self.process.poll() is not None or "http://" in self.text, "it says no address")
        self.url = re.search(r"http://127.0.0.1:\d+", self.text)[0]
        until(self.is_ready, "it is not ready")
        self.processes = [self.process.pid, *(each.pid for each in self.children())]
        self.ports = {each.laddr.port for pid in self.processes for each in listening(psutil.Process(pid))}

    @property
    def text(self):
        return "".join(self.log)

    def is_ready(self):
        assert self.process.poll() is None, self.text
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", timeout=1).status_code == 200

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self):
        """Rank 0 first: the fork server starts them one after the other."""
        return [each for each in self.children() if each.ppid() != self.process.pid]

    def ended(self):
        """Its exit status, once it and all of its processes have gone, with their files, ports and shared memory."""
        status = self.process.wait(PATIENCE_S)
        until(lambda: not any(map(psutil.pid_exists, self.processes)), "a process is left")
        until(lambda: not [name for name in os.listdir(self.folder) if "minillm" in name], "a file is left")
        until(lambda: not self.left_in_memory(), f"in shared memory: {self.left_in_memory()}")
        for port in self.ports:
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(("127.0.0.1", port))
        return status

    def left_in_memory(self):
        """Names in shared memory that its processes have made; those of other programs have another process's number,
        or were there."""
        new = set(os.listdir("/dev/shm")) - self.shared_memory
        return [name for name in new if any(str(pid) in name for pid in self.processes)]

    def signal_all(self, number):
        """As a terminal does it, or a service manager: every process of its group gets the signal."""
        os.killpg(self.process.pid, number)


def listening(process):
    return [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def open_stream(server, tokens):
    """An answer of which the first piece has come."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    asked = {"max_tokens": tokens, "temperature": 1, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="draft", prompt="def ", stream=True, **asked)
    next(stream)
    return stream


def last_reason(stream):
    return [chunk.choices[0] for chunk in stream if chunk.choices][-1].finish_reason


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path, "--tp", "2")
    try:
        server.wait()
        yield server
    finally:
        server.process.kill()


@pytest.mark.full
def test_clients_get_the_engine_s_answers_and_sigterm_ends_what_is_open(server):
    alone = engine()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    for asked in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2}):
        answers = client.completions.create(model="draft", prompt="def ", max_tokens=12, **asked).choices
        expected = alone.generate([alone.tokenizer.encode("def ")], SamplingParams(12, **asked))[0].answers
        assert [answer.text for answer in answers] == [answer.text for answer in expected]
    shown = httpx.get(f"{server.url}/metrics").text
    assert all(
        f'minillm_start_seconds{{phase="{each}"}}' in shown for each in ("process", "imports", "load", "warm-up")
    )
    stream = open_stream(server, 40)
    server.process.send_signal(signal.SIGTERM)
    assert last_reason(stream) == "length"
    assert server.ended() == 0, server.text
    assert "Traceback" not in server.text


POOL = ("--prefill-least", "2", "--order", "arrival")


@pytest.mark.full
@pytest.mark.drawn(4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "arguments", [("--tp", "2"), ("--pp", "2"), ("--prefill", "1", *POOL), ("--prefill", "1", "--decode", "2", *POOL)]
)
def test_a_signal_to_the_whole_group_ends_what_is_open_first(arguments, number, tmp_path):
    server = Server(tmp_path, *arguments)
    try:
        server.wait()
        stream = open_stream(server, 200)
        server.signal_all(number)
        assert last_reason(stream) == "length", server.text
        assert server.ended() in (0, 128 + signal.SIGINT), server.text  # as a command that Ctrl-C has ended
        assert "Traceback" not in server.text and "minillm: rank" not in server.text
    finally:
        server.process.kill()


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("arguments", [("--tp", "2"), ("--prefill", "1", "--decode", "2")])
def test_a_signal_to_the_whole_group_while_ranks_start_ends_all_in_silence(arguments, tmp_path):
    server = Server(tmp_path, *arguments)
    try:
        until(lambda: len(server.children()) >= 3, "no rank starts")
        server.processes, server.ports = [server.process.pid, *(each.pid for each in server.children())], ()
        server.signal_all(signal.SIGTERM)
        assert server.ended() in (0, -signal.SIGTERM), server.text
        assert "Traceback" not in server.text and "minillm: " not in server.text
    finally:
        server.process.kill()


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all_with_one_sentence(server, rank):
    server.ranks()[rank].kill()
    assert server.ended() == 1
    said = [line for line in server.log if line.startswith("minillm: ")]
    assert len(said) == 1 and "was killed by SIGKILL" in said[0] and "Traceback" not in server.text


@pytest.mark.full
def test_a_server_over_stages_answers_and_a_stage_that_is_killed_ends_it_with_one_sentence(tmp_path):
    server = Server(tmp_path, "--pp", "2", "--tp", "2")
    try:
        server.wait()
        alone, client = engine(), openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        answer = client.completions.create(model="draft", prompt="def ", max_tokens=12, temperature=0).choices[0]
        expected = alone.generate([alone.tokenizer.encode("def ")], SamplingParams(12))[0].answers[0]
        assert answer.text == expected.text
        server.ranks()[3].kill()
        assert server.ended() == 1
        said = [line for line in server.log if line.startswith("minillm: ")]
        assert len(said) == 1 and "rank 3 of 4 was killed by SIGKILL" in said[0] and "Traceback" not in server.text
    finally:
        server.process.kill()


@pytest.mark.full
def test_ctrl_c_ends_it(server):
    server.process.send_signal(signal.SIGINT)
    assert server.ended() == 0 and "Traceback" not in server.text


@pytest.mark.full
def test_a_server_that_is_killed_leaves_no_rank(server):
    server.process.kill()
    until(lambda: not any(map(psutil.pid_exists, server.processes[1:])), "a process is left")
    until(lambda: not [name for name in os.listdir(server.folder) if "minillm" in name], "a file is left")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--tp", "3", "def "], "8 attention heads do not divide over 3 tensor-parallel ranks"),
        (["generate", "--tp", "2", "--compile", "def "], "compile with an engine over ranks"),
        (["generate", "--tp", "2", "--speculate", "medusa", "def "], "proposer 'medusa' reads the target"),
        (["generate", "--tp", "2", "--device", "cpu:0", "def "], "--device cpu:0 is one device for 2 ranks: say cpu"),
        (["generate", "--pp", "8", "def "], "8 parts need 8 layers, but the model has"),
        (["serve", "--tp", "3", "--port", "0"], "8 attention heads do not divide over 3 tensor-parallel ranks"),
    ],
)
def test_what_ranks_cannot_do_is_one_sentence(arguments, said, capfd):
    assert run(arguments) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "http://" not in line]
    assert len(lines) == 1 and said in lines[0]


def test_generate_gives_the_text_of_one_process(capsys, tmp_path, monkeypatch):
    pieces, show = [], generate.show_text
    monkeypatch.setattr(generate, "show_text", lambda said: (pieces.append(said), show(said)))
    file = tmp_path / "prompts"
    file.write_text("def \nclass A:\n")
    plain = ["generate", "--temperature", "0.7", "--max-new-tokens", "12", "--model", "draft"]
    for asked in (["import os\n"], ["--batch", str(file)]):
        texts = []
        for layout in (["--tp", "1"], ["--tp", "2"], ["--pp", "2"]):
            assert run([*plain, *layout, *asked]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 30
    assert len(pieces) > 2 * 10, "it is not shown piece by piece"


def test_what_rank_0_says_is_heard_while_it_runs(tmp_path):
    heard = []

    def hear(piece):
        heard.append(piece)
        (tmp_path / piece).touch()

    def program(group):
        for piece in "abc" if group.rank == 0 else "":
            say(piece)
            while not (tmp_path / piece).exists():
                time.sleep(0.01)

    with ranks.hearing(hear) as say:
        launch(program, 2)
    assert heard == ["a", "b", "c"]


def test_what_cannot_be_shown_is_told_at_the_end():
    with pytest.raises(BrokenPipeError, match="b"), ranks.hearing(fail_at("b")) as say:
        launch(lambda group: [say(piece) for piece in "abc"], 1)
    with ranks.hearing(print):
        pass  # no rank came


def fail_at(piece):
    def hear(said):
        assert said <= piece, "it goes on after a failure"
        if said == piece:
            raise BrokenPipeError(said)

    return hear


def torchrun(*arguments):
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


@pytest.mark.full
def test_two_nodes_of_torchrun_serve_together(tmp_path):
    """Both on loopback, a rank each: the first has the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    node = torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting)
    command = [*node, "-m", "minillm", *SERVE[3:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    processes = [
        subprocess.Popen([*command, "--tp", "2"], stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)
    ]
    lines = []
    try:
        for process in processes:
            threading.Thread(target=lambda stream=process.stderr: lines.extend(stream), daemon=True).start()
        until(lambda: any("http://" in line for line in lines), "it says no address")
        url = re.search(r"http://127.0.0.1:\d+", "".join(lines))[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=9)
        answer = client.completions.create(model="draft", prompt="def ", max_tokens=12, temperature=0).choices[0]
        alone = engine()
        expected = alone.generate([alone.tokenizer.encode("def ")], SamplingParams(12))[0].answers[0]
        assert answer.text == expected.text
        children = [each.pid for process in processes for each in psutil.Process(process.pid).children(recursive=True)]
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(PATIENCE_S)
    until(lambda: not any(map(psutil.pid_exists, children)), "a rank is left")


@pytest.mark.full
@pytest.mark.drawn(2)
@pytest.mark.parametrize("to_all", [False, True], ids=["SIGTERM to torchrun", "Ctrl-C in its terminal"])
def test_a_signal_to_torchrun_ends_what_is_open_first(to_all, tmp_path):
    arguments = ["-m", "minillm", *SERVE[3:], "--tp", "2"]
    server = Server(tmp_path, command=torchrun("--standalone", "--nproc-per-node", "2", *arguments))
    try:
        server.wait()
        stream = open_stream(server, 200)
        server.signal_all(signal.SIGINT) if to_all else server.process.send_signal(signal.SIGTERM)
        assert last_reason(stream) == "length"
        server.process.wait(PATIENCE_S)
        until(lambda: not any(map(psutil.pid_exists, server.processes)), "a process is left")
    finally:
        server.process.kill()
