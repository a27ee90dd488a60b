"""What launch says when ranks raise, die, hang or are interrupted, and that nothing of them is left."""

import glob
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import rank_programs as programs
import torch

from minillm.comm import HangError, MismatchError, RankError, launch
from minillm.comm.launch.launcher import STORE_S
from minillm.comm.launch.outcome import _death

pytestmark = pytest.mark.drawn(2)

ROOT = Path(__file__).parents[3]


def children() -> list[psutil.Process]:
    """Processes below this one, without the two that multiprocessing keeps for good."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            keeper = "multiprocessing.forkserver" in command and process.ppid() == os.getpid()
            if not keeper and "resource_tracker" not in command and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def traces() -> tuple[list, list, list, int]:
    """(child processes, listening ports, temporary files, file descriptors) of this process."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    ports = [c.laddr.port for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    patterns = ("minillm-*", "torchelastic*", "pytorch-errorfile-*", "pymp-*/listener*")
    files = [path for pattern in patterns for path in glob.glob(os.path.join(tempfile.gettempdir(), pattern))]
    mine = [path for path in files if os.stat(path).st_uid == os.getuid()]
    return children(), ports, [path for path in mine if "listener" not in path], psutil.Process().num_fds()


@pytest.fixture(autouse=True)
def private_temp(tmp_path, monkeypatch):
    """Temporary files of these tests go to a folder of their own, which has to be empty afterwards."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not children()
    assert not list(folder.glob("minillm-*"))


def start_python(folder: Path, *args: str) -> subprocess.Popen:
    """A parent process of its own, in `folder`, with its temporary files there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *args], env=environment, cwd=folder, text=True, **pipes)


# A rank raises.


@pytest.mark.drawn(2)
@pytest.mark.parametrize("how", ["idle", "collective", "ring", "async", "objects", "wrapped", "spin"])
def test_cause_is_the_rank_that_raised(how: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(programs.raise_alone, 3, 2, how)
    error = caught.value
    assert error.rank == 2 and error.exitcode is None
    assert "rank 2 of 3 raised KeyError: 'the cause is here'" in str(error)
    assert 'raise KeyError("the cause is here")  # source line' in str(error)
    assert "/minillm/comm/" not in str(error)  # the traceback begins at the caller's own function
    assert isinstance(error.__cause__, KeyError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_first_of_two_failures_is_the_cause() -> None:
    for _ in range(3):
        with pytest.raises(RankError, match="rank 1 of 2 raised ValueError: first"):
            launch(programs.raise_both, 2)


@pytest.mark.full
def test_raising_many_times_never_blames_a_rank_that_was_stopped() -> None:
    for i in range(8):
        with pytest.raises(RankError, match=f"rank {i % 4} of 4 raised"):
            launch(programs.raise_alone, 4, i % 4, "collective")


def test_exceptions_that_do_not_pickle_or_have_no_text() -> None:
    with pytest.raises(RankError, match="raised Stubborn"):
        launch(programs.raise_stubborn, 2)
    with pytest.raises(RankError, match="raised NeedsTwo: 1 and 2"):
        launch(programs.raise_needs_two, 1)


def test_result_that_does_not_pickle() -> None:
    with pytest.raises(RankError, match=r"the result of rank 1 cannot be sent back: .*lock"):
        launch(programs.return_a_lock, 2)


def test_function_that_cannot_be_loaded_in_the_rank() -> None:
    module = types.ModuleType("only_in_this_process")
    exec("def program(group):\n    return 1", module.__dict__)
    module.program.__module__ = module.__name__
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(RankError, match="No module named 'only_in_this_process'"):
            launch(module.program, 3)
    finally:
        del sys.modules[module.__name__]


def test_argument_that_does_not_pickle() -> None:
    with pytest.raises(ValueError, match=r"cannot send big and its arguments to the ranks: .*lock"):
        launch(programs.big, 2, threading.Lock())


# A rank dies.


@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("exit 7", "rank 1 of 3 ended its process with exit code 7", 7),
        ("exit 0", "rank 1 of 3 ended its process with exit code 0", 0),
        ("SIGKILL", "rank 1 of 3 was killed by SIGKILL", -signal.SIGKILL),
        ("SIGSEGV", "rank 1 of 3 was killed by SIGSEGV", -signal.SIGSEGV),
        ("sys.exit", "rank 1 of 3 raised SystemExit: 3", None),
    ],
)
def test_cause_is_the_rank_that_died(how: str, message: str, code: int | None) -> None:
    with pytest.raises(RankError, match=message) as caught:
        launch(programs.end, 3, 1, how)
    assert caught.value.rank == 1 and caught.value.exitcode == code


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert _death(-(signal.SIGRTMIN + 6)) == f"was killed by signal {signal.SIGRTMIN + 6}"


def test_cause_is_the_rank_that_died_after_the_others_were_done() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        launch(programs.die_last, 2)
    assert caught.value.rank == 1


def test_a_single_rank_that_exits_silently() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 ended its process with exit code 0"):
        launch(programs.end, 1, 0, "exit 0")


# Hangs.


def table_of(how: str, nproc: int = 3) -> dict[int, str]:
    start = time.monotonic()
    with pytest.raises(HangError) as caught:
        launch(programs.hang, nproc, how, timeout=1.5)
    assert time.monotonic() - start >= 1.5
    assert not children()
    error = caught.value
    assert error.table in str(error)
    assert pickle.loads(pickle.dumps(error)).table == error.table
    lines = error.table.splitlines()
    assert lines[0].split("  ")[0] == "rank" and len(lines) == 2 + nproc
    return {int(line.split()[0]): line for line in lines[2:]}


def test_hang_in_a_collective_shows_who_is_missing_and_where_it_is() -> None:
    table = table_of("collective")
    assert "all_reduce" in table[0] and "[4, 2] float32" in table[0] and table[0].endswith("rank 1")
    assert table[2].endswith("rank 1") and "world" in table[2]
    assert "in no operation" in table[1] and "hang, line" in table[1] and "# waiting for nothing" in table[1]


def test_hang_in_a_cycle_of_receives() -> None:
    table = table_of("cycle")
    for rank in range(3):
        assert "recv" in table[rank] and table[rank].endswith(f"rank {(rank + 1) % 3}")


@pytest.mark.full
def test_hang_in_a_subgroup() -> None:
    table = table_of("subgroup")
    assert "all_gather" in table[0] and "pair" in table[0] and table[0].endswith("rank 2")
    assert "finished" in table[1] and "finished" in table[2]


def test_hang_because_a_rank_returned() -> None:
    table = table_of("returned")
    assert "finished" in table[2]
    assert any(table[rank].endswith("rank 2") for rank in (0, 1))


def test_hang_of_a_handle_against_a_receive() -> None:
    table = table_of("async", nproc=2)
    assert "all_reduce" in table[0] and table[0].endswith("rank 1")
    assert "recv" in table[1] and table[1].endswith("rank 0")


@pytest.mark.full
def test_hang_of_all_ranks_spinning() -> None:
    table = table_of("spin")
    assert all("in no operation, hang" in line for line in table.values())


def test_a_stopped_rank_is_named_also_while_another_talks() -> None:
    table = table_of("stopped", nproc=2)
    assert "stopped by a signal" in table[1] and "stopped" not in table[0]


@pytest.mark.full
def test_a_rank_stopped_inside_an_operation_is_named() -> None:
    table = table_of("stopped inside", nproc=2)
    assert "all_reduce, stopped by a signal" in table[1]


def test_a_rank_that_holds_the_interpreters_lock_is_found() -> None:
    table = table_of("lock", nproc=2)
    assert "all_reduce" in table[0] and table[0].endswith("rank 1")
    assert "hang, line" in table[1] and "PyDLL" in table[1]


def test_an_interrupt_of_a_single_rank_stops_nothing() -> None:
    assert launch(programs.interrupt_oneself, 2) == [3.0, 3.0]


def test_different_operations_are_a_mismatch_not_a_hang() -> None:
    with pytest.raises(RankError, match=r"gather_objects.*barrier|barrier.*gather_objects") as caught:
        launch(programs.hang, 3, "other order", timeout=5)
    assert isinstance(caught.value.__cause__, MismatchError)


@pytest.mark.full
def test_a_rank_that_returns_early_is_no_hang() -> None:
    assert launch(programs.slow_but_alive, 3, 3.0, timeout=2.0) == [0, 1, 2]


@pytest.mark.full
def test_output_is_a_sign_of_life(capfd) -> None:
    assert launch(programs.talk_slowly, 2, 3.0, timeout=2.0) == [True, True]


# Results, arguments, environment.


@pytest.mark.full
def test_large_arguments_and_results() -> None:
    x = torch.arange(12_500_000, dtype=torch.float32)  # 50 MB
    first, second = launch(programs.big, 2, x)
    assert torch.equal(first, x) and torch.equal(second, x + 1)


def test_ranks_see_the_environment_of_now(monkeypatch, tmp_path) -> None:
    launch(programs.nothing, 1)  # the fork server is there by now
    monkeypatch.setenv("MINILLM_TEST_VALUE", "new")
    monkeypatch.setenv("MASTER_ADDR", "nonsense.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("LOCAL_RANK", "9")
    monkeypatch.chdir(tmp_path)
    values = launch(programs.environment, 2, "MINILLM_TEST_VALUE")
    assert values == [("new", str(tmp_path), str(rank), "127.0.0.1") for rank in range(2)]
    monkeypatch.delenv("MINILLM_TEST_VALUE")
    assert launch(programs.environment, 1, "MINILLM_TEST_VALUE")[0][0] is None


def test_nested_launch_is_refused() -> None:
    with pytest.raises(RankError, match="ValueError: launch was called inside a rank"):
        launch(programs.nested, 2)


def test_a_function_may_leave_handles_and_threads_behind() -> None:
    start = time.monotonic()
    assert launch(programs.leave_handle, 3) == [0, 1, 2]
    assert launch(programs.leave_thread, 2) == [0, 1]
    assert time.monotonic() - start < programs.LEFT_S


def test_done_turns_true_without_wait() -> None:
    assert launch(programs.done_turns_true, 2) == [
        (False, True, [0.0] * 3, True),
        (False, True, [0.0] * 3, True),
    ]


@pytest.mark.parametrize("nproc", [0, -1, 65, True, 2.5, "4", None])
def test_bad_nproc(nproc) -> None:
    with pytest.raises(ValueError, match=r"nproc=.* must be a whole number from 1 to 64"):
        launch(programs.nothing, nproc)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "60", None, True])
def test_bad_timeout(timeout) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* must be a number of seconds"):
        launch(programs.nothing, 1, timeout=timeout)


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match="is not a function"):
        launch(3, 2)
    with pytest.raises(ValueError, match="must be a Link or a Topology"):
        launch(programs.nothing, 2, link=1e9)
    with pytest.raises(ValueError, match="must be 'cpu', 'cuda' or None"):
        launch(programs.nothing, 2, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RankError, match="torch finds no GPU"):
            launch(programs.nothing, 2, device="cuda")


# Output.


def test_every_line_arrives_whole_and_prefixed(capfd) -> None:
    launch(programs.talk, 4, 2500)
    out, err = capfd.readouterr()
    lines = out.splitlines()
    for rank in range(4):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert [line for line in mine if line.startswith("line ")] == [
            f"line {i} of {rank} " + "x" * (i % 90) for i in range(2500)
        ]
        assert [line for line in mine if not line.startswith("line ")] == [
            f"to stderr {rank}", f"from C {rank}", "raw", "no newline at the end",
        ]  # fmt: skip
    assert len(lines) == 4 * 2504 and err == ""


def test_last_words_of_a_killed_rank_arrive(capfd) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        launch(programs.talk_and_die, 1)
    assert capfd.readouterr().out == "[rank 0] last words in C 0\n[rank 0] last words in Python\n"


def test_odd_output_is_shown_somehow(capfd) -> None:
    launch(programs.speak_oddly, 1)
    out = capfd.readouterr().out
    assert "é 漢" in out and "broken" in out and "y" * 200_000 in out
    assert all(line.startswith("[rank 0] ") for line in out.split("\n")[:-1])


# Where launch is called from.


def test_launch_from_threads_at_once() -> None:
    results: dict[int, list] = {}
    main = dict(sys.modules["__main__"].__dict__)
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: launch(programs.rank_and_sum, n)})) for n in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [(rank, [float(n)] * 3) for rank in range(n)] for n in (1, 2, 3)}
    after = sys.modules["__main__"].__dict__
    assert {name: after.get(name) for name in ("__file__", "__spec__")} == {
        name: main.get(name) for name in ("__file__", "__spec__")
    }


@pytest.mark.full
def test_launch_without_main_guard(tmp_path) -> None:
    """From a file, `python -c` and standard input: functions defined beside the call; the script itself runs once."""
    text = """
import torch
from minillm.comm import launch
print("once")
def f(group, offset):
    return group.all_reduce(torch.tensor([group.rank + offset])).item()
print(launch(f, 3, 10))
"""
    (tmp_path / "script.py").write_text(text)
    started = [start_python(tmp_path, *args) for args in (["script.py"], ["-c", text], ["-"])]
    for process in started:
        out, err = process.communicate(text if process.args[-1] == "-" else None, timeout=300)
        assert (out, err, process.returncode) == ("once\n[33, 33, 33]\n", "", 0)


ENDLESS = """
import os, signal, sys, threading, time
from minillm.comm import launch

def f(group):
    print("pid", os.getpid())
    while True:
        time.sleep(0.05)

if len(sys.argv) > 1:
    threading.Timer(float(sys.argv[1]), signal.raise_signal, [signal.SIGINT]).start()
launch(f, 3)
"""

INTERRUPTED_ANYWHERE = """
import signal, sys, time
from minillm.comm import launch
from minillm.comm.launch import launcher

name = sys.argv[1]
original = getattr(launcher.Run, name)

def interrupted(*args):
    signal.raise_signal(signal.SIGINT)
    return original(*args)

setattr(launcher.Run, name, interrupted)
launch(lambda group: time.sleep(1000), 2)
"""

IN_A_THREAD = """
import threading, time
from minillm.comm import launch

def f(group):
    print("pid", flush=True)
    time.sleep(1000)

threading.Thread(target=launch, args=(f, 2), daemon=True).start()
input()
"""


def start_endless(folder: Path, *args: str) -> subprocess.Popen:
    path = folder / "endless.py"
    if not path.exists():
        path.write_text(ENDLESS)
    return start_python(folder, path.name, *args)


@pytest.mark.full
def test_ranks_die_with_their_launcher(tmp_path) -> None:
    """Ctrl-C (also an impatient one), kill, kill -9: no rank survives, nor its folder."""
    hows = ["SIGINT", "SIGINT twice", "SIGTERM", "SIGKILL"]
    for how, launcher in [(how, start_endless(tmp_path)) for how in hows]:
        pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(3)]
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert set(pids) <= {process.pid for process in family}
        number, *again = how.split()
        for _ in range(1 + len(again)):
            launcher.send_signal(getattr(signal, number))
            time.sleep(0.01)
        _, err = launcher.communicate(timeout=300)
        assert launcher.returncode == -getattr(signal, number)
        assert ("KeyboardInterrupt" in err) == (number == "SIGINT")
        assert not psutil.wait_procs(family, timeout=300)[1]
    assert not list(tmp_path.glob("minillm-*"))


@pytest.mark.full
def test_stopped_ranks_end_with_their_launcher_too(tmp_path) -> None:
    """A stopped process cannot notice anything itself: another rank ends it."""
    launcher = start_endless(tmp_path)
    pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(3)]
    family = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(pids[1], signal.SIGSTOP)
    launcher.kill()
    launcher.communicate(timeout=300)
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert not list(tmp_path.glob("minillm-*"))


def test_the_store_is_not_waited_for_longer_than_the_timeout(monkeypatch) -> None:
    """Where no file descriptor is left torch would try to reach it for 300 s."""
    waits = []

    class NoStore(Exception):
        pass

    def store(*_, **how):
        waits.append(how["timeout"].total_seconds())
        os.close(how["master_listen_fd"])
        raise NoStore

    monkeypatch.setattr("torch.distributed.TCPStore", store)
    for timeout in (2.0, 600.0):
        with pytest.raises(NoStore):
            launch(programs.nothing, 2, timeout=timeout)
    assert waits == [2.0, STORE_S]


@pytest.mark.full
def test_interrupted_while_ranks_start(tmp_path) -> None:
    """Ctrl-C at several moments of the start-up."""
    for launcher in [start_endless(tmp_path, delay) for delay in ("0.001", "0.1", "0.8")]:
        assert "KeyboardInterrupt" in launcher.communicate(timeout=300)[1]
    time.sleep(0.2)
    left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(tmp_path)]
    assert not psutil.wait_procs(left, timeout=300)[1]
    assert not list(tmp_path.glob("minillm-*"))


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize("method", ["results", "_watch", "_end_ranks", "_forget_ranks", "_show_output"])
def test_interrupted_in_any_step(method, tmp_path) -> None:
    """Also where it begins to clean up: ranks left running would keep their launcher for ever."""
    (tmp_path / "script.py").write_text(INTERRUPTED_ANYWHERE)
    launcher = start_python(tmp_path, "script.py", method)
    if method in ("_end_ranks", "_forget_ranks"):
        time.sleep(1)
        launcher.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in launcher.communicate(timeout=300)[1]
    assert not list(tmp_path.glob("minillm-*"))


@pytest.mark.full
def test_a_launch_in_a_daemon_thread_does_not_keep_the_process(tmp_path) -> None:
    (tmp_path / "script.py").write_text(IN_A_THREAD)
    launcher = start_python(tmp_path, "script.py")
    assert launcher.stdout.readline().endswith("pid\n")
    launcher.communicate("\n", timeout=300)
    left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("TMPDIR") == str(tmp_path)]
    assert not psutil.wait_procs(left, timeout=300)[1]


@pytest.fixture
def short_folder():
    """Not tmp_path, which pytest-xdist makes longer than a socket's address may be: the server then uses /tmp."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.full
def test_the_servers_socket_goes_however_the_launcher_ends(short_folder) -> None:
    """Killed while ranks run: they remove its folder. Killed later: the next launch does."""
    killed = start_endless(short_folder)
    killed.stdout.readline()
    killed.kill()
    killed.communicate()
    give_up_at = time.monotonic() + 90
    while (left := temporary(short_folder)) and time.monotonic() < give_up_at:
        time.sleep(0.2)
    assert not left
    program = "import os, signal; from minillm.comm import launch; launch(lambda g: 0, 1); "
    start_python(short_folder, "-c", program + "os.kill(os.getpid(), signal.SIGKILL)").communicate(timeout=180)
    assert len(list(short_folder.glob("minillm.server-*"))) == 1
    start_python(short_folder, "-c", program).communicate(timeout=180)
    assert not temporary(short_folder)


def temporary(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(("minillm", "pymp-"))]


# Nothing is left.


@pytest.mark.full
def test_many_launches_leave_nothing() -> None:
    launch(programs.nothing, 2)
    before, threads = traces(), threading.active_count()
    for _ in range(15):
        launch(programs.nothing, 2)
    assert threading.active_count() == threads
    assert traces() == before


@pytest.mark.full
def test_failing_launches_leave_nothing() -> None:
    """Also while their errors are still held, as a notebook holds the last one."""
    launch(programs.nothing, 2)
    before, threads, held = traces(), threading.active_count(), []
    for how in ("idle", "collective", "async") * 3:
        with pytest.raises(RankError) as caught:
            launch(programs.raise_alone, 2, 1, how)
        held.append(caught)
    for how in ("exit 0", "SIGKILL"):
        with pytest.raises(RankError) as caught:
            launch(programs.end, 2, 1, how)
        held.append(caught)
    assert threading.active_count() == threads
    assert traces() == before and len(held) == 11


def test_the_store_listens_on_loopback_only() -> None:
    addresses = launch(programs.listening, 1)[0]
    assert addresses and set(addresses) == {"127.0.0.1"}
