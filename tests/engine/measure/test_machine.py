"""The machine card with a faked machine (nothing here depends on how fast this one is) and its cache."""

import importlib
import json
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from minillm.measure import machine
from minillm.measure.rates import LinkFit, fit_link, matmul_flops, memory_bandwidth

card_module = importlib.import_module("minillm.measure.machine")
ALPHA, BETA = 50e-6, 2e9
SIZES = [2**k for k in (10, 12, 14, 16, 18, 20, 22, 23)]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A machine of round numbers: counts how often it is measured, and what the probe answers can be set."""
    state = types.SimpleNamespace(
        measured=0, returncode=0, stderr="", stdout=None, command=None, cache=tmp_path / "cache"
    )
    lines = {n: [[size, n * ALPHA + size * n / BETA] for size in SIZES] for n in (2, 3, 4)}
    state.stdout = "a rank said something\n" + json.dumps(lines) + "\n"

    def peak(dtype, threads, sizes=()):
        state.measured += dtype == "float32" and threads == 1
        return {"float32": 1e11, "bfloat16": 2e11}[dtype] * threads

    class Probe:
        def __init__(self, command, **kwargs):
            state.command, self.returncode = command, state.returncode

        def communicate(self, timeout=None):
            return state.stdout, state.stderr

    monkeypatch.setenv("XDG_CACHE_HOME", str(state.cache))
    monkeypatch.setattr(card_module, "_cores", lambda: 4)
    monkeypatch.setattr(card_module, "_gpu", lambda: None)
    monkeypatch.setattr(card_module.rates, "matmul_flops", peak)
    monkeypatch.setattr(card_module.rates, "memory_bandwidth", lambda threads, size: 2.5e10)
    monkeypatch.setattr(card_module.subprocess, "Popen", Probe)
    return state


def test_card_says_what_was_measured(fake):
    card = machine()
    assert (card.cores, card.peak_flops, card.peak_flops_one_thread) == (4, 4e11, 1e11)
    assert sorted(card.links) == [2, 3, 4]
    for n, fit in card.links.items():
        assert fit.latency_s == pytest.approx(n * ALPHA)
        assert fit.bandwidth_bytes_per_s == pytest.approx(BETA / n)
        assert fit.error == pytest.approx(0, abs=1e-9)
        assert [size for size, _ in fit.samples] == SIZES
    assert card.link(3) is card.links[3]
    assert card.link(64) is card.links[4] and card.link(1) is card.links[2]
    assert fake.command[:3] == [sys.executable, "-m", "minillm.comm.probe"]
    assert fake.command[-1] == "2,3,4"
    text = str(card)
    for words in ("400 GFLOP/s", "25 GB/s", "16.0 FLOP/byte", "100 µs + bytes / 1 GB/s", "torch"):
        assert words in text
    assert card._repr_html_().count("<tr>") == len(text.splitlines())


def test_card_is_measured_once_and_again_on_demand(fake):
    first = machine()
    assert machine() == first and fake.measured == 1
    assert machine(refresh=True).links == first.links and fake.measured == 2
    assert [path.name for path in (fake.cache / "minillm").iterdir()] == ["machine.json"]  # no scratch file left


def test_cards_of_other_machines_stay(fake, monkeypatch):
    machine()
    monkeypatch.setattr(card_module, "_cores", lambda: 8)
    assert machine().cores == 8 and fake.measured == 2
    monkeypatch.setattr(card_module, "_cores", lambda: 4)
    assert machine().cores == 4 and fake.measured == 2


@pytest.mark.parametrize(
    "text", ["", "{not json", "[]", "null", "3", "{KEY: {}}", "{KEY: 7}", '{KEY: {"links": {"2": {}}}}', "\x00"]
)
def test_a_corrupt_cache_is_measured_anew(fake, text, capsys):
    first = machine()
    path = fake.cache / "minillm" / "machine.json"
    (key,) = json.loads(path.read_text())
    path.write_text(text.replace("KEY", json.dumps(key)))
    assert machine().links == first.links and fake.measured == 2
    assert machine().links == first.links and fake.measured == 2  # repaired
    assert capsys.readouterr().err == ""


def test_an_unwritable_cache_costs_one_warning(fake, capsys):
    fake.cache.write_text("a file where the folder should be")
    assert machine().peak_flops == 4e11
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(fake.cache) in warning and "XDG_CACHE_HOME" in warning
    assert machine().peak_flops == 4e11 and fake.measured == 1  # it lasts as long as the process
    assert capsys.readouterr().err == ""
    assert fake.cache.read_text() == "a file where the folder should be"


@pytest.mark.parametrize(
    "change",
    [
        {"returncode": 1, "stderr": "Traceback\nOSError: no loopback"},
        {"stdout": "no json here"},
        {"stdout": ""},
        {"stdout": '{"2": [[1024, 0.0]]}'},
    ],
)
def test_without_ranks_there_is_a_card_without_links(fake, change, capsys):
    vars(fake).update(change)
    card = machine()
    assert card.links == {} and card.peak_flops == 4e11
    (warning,) = capsys.readouterr().err.splitlines()
    assert "links between ranks could not be measured" in warning
    if "stderr" in change:
        assert warning.endswith("OSError: no loopback")
    with pytest.raises(ValueError, match="no link was measured"):
        card.link(2)
    machine()
    assert fake.measured == 2  # not kept: the next call tries again


def test_a_probe_that_hangs_is_ended_with_all_it_started(monkeypatch, tmp_path, capsys):
    """The stand-in probe starts a child that would sleep for ever, and leaves a file in its scratch folder."""
    note = tmp_path / "child"
    script = tmp_path / "probe"
    script.write_text(
        f"#!/bin/sh\nsleep 1000 &\necho $! $TMPDIR > {note}.new\nmv {note}.new {note}\ntouch $TMPDIR/x\nwait\n"
    )
    script.chmod(0o755)

    def slow_start(*args, **kwargs):
        probe = popen(*args, **kwargs)
        while not note.exists():
            time.sleep(0.01)
        return probe

    popen = subprocess.Popen
    monkeypatch.setattr(card_module.subprocess, "Popen", slow_start)
    monkeypatch.setattr(card_module.sys, "executable", str(script))
    monkeypatch.setattr(card_module, "PROBE_TIMEOUT_S", 0.2)
    assert card_module._links() == {}
    assert "timed out" in capsys.readouterr().err
    child, scratch = note.read_text().split()
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE
    assert not Path(scratch).exists()


def test_json_round_trip_with_a_gpu(fake, monkeypatch):
    gpu = card_module.Gpu("H200", 141 * 10**9, 7e14, 5e13, 4e12)
    monkeypatch.setattr(card_module, "_gpu", lambda: gpu)
    card = machine()
    assert card_module.Machine.from_json(json.loads(json.dumps(card.to_json()))) == card
    assert machine() == card and "H200" in str(card)


def test_a_busy_machine_is_named(fake, monkeypatch):
    monkeypatch.setattr(psutil, "getloadavg", lambda: (10.0, 0.0, 0.0))
    assert "load 2.5 per core" in str(machine())


def test_fit_finds_the_line_and_owns_up_to_its_error():
    samples = [(size, (ALPHA + size / BETA) * (1.1 if i % 2 else 0.9)) for i, size in enumerate(SIZES)]
    fit = fit_link(2, samples)
    assert fit.latency_s == pytest.approx(ALPHA, rel=0.2)
    assert fit.bandwidth_bytes_per_s == pytest.approx(BETA, rel=0.2)
    assert 0.03 < fit.error < 0.15
    assert fit.seconds(10**6) == fit.latency_s + 10**6 / fit.bandwidth_bytes_per_s
    below = fit_link(2, [(1000, 1e-6), (2000, 3e-6)])  # a line through these would start before time
    assert below == LinkFit(2, 0.0, pytest.approx(5e8), pytest.approx(below.error), ((1000, 1e-6), (2000, 3e-6)))


@pytest.mark.parametrize(
    "samples, names",
    [
        ([], "two sizes"),
        ([(1, 1.0), (1, 2.0)], "two sizes"),
        ([(1, 0.0), (2, 1.0)], "above zero"),
        ([(1, 2.0), (2, 1.0)], "grow"),
    ],
)
def test_fit_refuses_what_is_no_line(samples, names):
    with pytest.raises(ValueError, match=names):
        fit_link(2, samples)


def test_rates_are_those_of_the_clock(monkeypatch):
    """With a clock that ticks one second per reading, every rate is its work per second."""
    import torch

    from minillm.measure import rates

    ticks = iter(range(10**6))
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(ticks))
    threads = torch.get_num_threads()
    assert matmul_flops("float32", 1, sizes=(8, 16)) == 2 * 16**3
    assert memory_bandwidth(1, 4096) == 3 * 4096
    assert torch.get_num_threads() == threads


@pytest.mark.full
def test_probe_times_real_ranks():
    command = [sys.executable, "-m", "minillm.comm.probe", "--world-sizes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout.splitlines()[-1])
    assert list(samples) == ["2"]
    assert [size for size, _ in samples["2"]] == SIZES
    assert all(seconds > 0 for _, seconds in samples["2"])


@pytest.mark.parametrize("text", ["1", "2,x", "", "2,1000"])
def test_probe_refuses_other_world_sizes(text, capsys):
    from minillm.comm.probe import main

    with pytest.raises(SystemExit) as error:
        main(["--world-sizes", text])
    assert error.value.code == 2
    assert "--world-sizes" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.cuda
def test_gpu_rates():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    gpu = card_module._gpu()
    assert gpu.peak_flops_bf16 > gpu.peak_flops_fp32 > 0
    assert gpu.memory_bandwidth_bytes_per_s > 0 and gpu.name
