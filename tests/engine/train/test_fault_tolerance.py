"""Who is dead, hung, slow or silent, which replica is corrupted, and where the time went: by counts, not by clocks."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.comm import launch
from minillm.data import Tokens
from minillm.model import ModelConfig
from minillm.train import ParallelConfig, StepTime, TrainConfig, Trainer, fit
from minillm.train.fault_tolerance.elastic import accumulate_for, possible_ranks
from minillm.train.fault_tolerance.goodput import FILE, Goodput, TimeLog, goodput, read_goodput
from minillm.train.fault_tolerance.heartbeat import Beat, Health, HealthMonitor, Heart, Limits, Process, Watcher, look
from minillm.train.fault_tolerance.replica_check import check_replicas, divergence, hash_tensor
from minillm.train.fault_tolerance.straggler import StragglerDetector
from minillm.train.metrics import read_metrics
from minillm.train.run_folder import locked
from minillm.train.strategies.hybrid import make_strategy

MODEL = ModelConfig(50, 16, 32, 2, 4, 2, max_seq_len=16)
QUIET = {"progress": False, "tensorboard": False}


def trainer(parallel=None, **options):
    text = Tokens((torch.arange(2000) * 7 % 50).numpy().astype("uint16"), 50, 0, 1, 6000)
    options = {"seq_len": 16, "batch_size": 2, "steps": 20, "warmup_steps": 2} | options
    return Trainer(TrainConfig(MODEL, **options), text, workers=0, parallel=parallel)


# Slow ranks.


def test_a_straggler_is_named_by_its_own_work_though_all_steps_take_equally_long():
    draw = random.Random(2)
    detector = StragglerDetector(4, window=10)
    for step in range(20):
        for rank in range(4):
            noise = 10.0 if draw.random() < 0.2 else 1.0  # single steps that something else disturbs
            slow = 3.0 if rank == 2 and step >= 5 else 1.0
            detector.add(rank, (0.0, 1.0 * noise, 2.0 * slow * noise, 0.1, 0.1))
        if step == 8:
            assert detector.stragglers() == []  # too few steps to say
    (found,) = detector.stragglers()
    assert (found.rank, found.phase) == (2, "backward") and found.factor == pytest.approx(7.2 / 3.2)
    assert str(found) == "rank 2 takes 2.2 times as long as its peers, most of it in backward"


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    detector = StragglerDetector(4, stride=2, window=1)  # ranks 0 and 2 hold the first stage, 1 and 3 the second
    for rank, seconds in enumerate((1.0, 9.0, 1.1, 10.0)):
        detector.add(rank, (0, seconds, 0, 0, 0))
    assert detector.stragglers() == []
    detector.add(3, (0, 30.0, 0, 0, 0))
    assert [each.rank for each in detector.stragglers()] == [3]
    with pytest.raises(ValueError, match="stride 3 does not divide the 4 ranks"):
        StragglerDetector(4, stride=3)
    with pytest.raises(ValueError, match="lines of 3 ranks, 2 apart, do not divide the 8 ranks"):
        StragglerDetector(8, stride=2, count=3)


def test_peers_are_those_along_the_data_parallel_axis_wherever_that_lies():
    inner = StragglerDetector(8, stride=2, count=2, window=1)  # pp 2 outside, dp 2, tp 2 inside
    for rank, seconds in enumerate((1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0)):  # the second stage takes longer
        inner.add(rank, (0, seconds, 0, 0, 0))
    assert [each.rank for each in inner.stragglers()] == [3]


# Heartbeats.


def test_dead_hung_slow_and_silent_are_told_apart():
    limits, seen = Limits(every_s=1, silent_s=10, hung_s=60), {}
    watcher = Watcher(limits, lambda beat: seen.get(beat.rank, Process.RUNNING))
    here = {rank: Beat(rank, 100 + rank, "here", 0, 0, False) for rank in range(7)}
    moving, beating = {0, 4}, {0, 1, 2, 4}  # 1 and 2 make no steps, 3 and 5 no beats; 6 is stopped by a signal
    for now in range(100):
        for rank, beat in here.items():
            if rank in beating or now < 20:
                step = now if rank in moving or now < 20 else 20
                watcher.see(replace(beat, count=now, progress=step, waiting=rank == 2), float(now))
        if now == 21:
            seen |= {3: Process.GONE, 5: None, 6: Process.STOPPED}
        if now == 50:
            assert watcher.judge(1, 50.0) is Health.HEALTHY  # a long step so far
    found = {rank: watcher.judge(rank, 99.0, slow={4}) for rank in here}
    assert found == {
        0: Health.HEALTHY,
        1: Health.HUNG,
        2: Health.WAITING,
        3: Health.DEAD,
        4: Health.SLOW,
        5: Health.SILENT,
        6: Health.HUNG,
    }
    assert watcher.judge(9, 99.0) is None
    assert watcher.sentence(3, Health.DEAD, 99.0) == "rank 3 is dead: process 103 on here has gone"
    assert "no sign of process 105 on here for 80 s" in watcher.sentence(5, Health.SILENT, 99.0)
    assert "no progress for 79 s and waits for no other rank" in watcher.sentence(1, Health.HUNG, 99.0)
    with pytest.raises(ValueError, match="beats must come faster"):
        Limits(every_s=20, silent_s=10)


def test_what_the_machine_knows_about_a_process():
    import socket

    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    beat = Beat(1, child.pid, socket.gethostname(), 1, 1, False)
    try:
        child.stdout.readline()
        assert look(beat) is Process.RUNNING and look(replace(beat, host="elsewhere")) is None
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert look(beat) is Process.STOPPED
    finally:
        child.kill()
        child.communicate()
    assert look(beat) is Process.GONE


def test_a_neighbour_that_dies_is_named_and_one_that_leaves_is_not(tmp_path):
    """Real threads and files; the limits decide only how long it takes."""
    import threading

    hung, dead_is_named = threading.Event(), threading.Event()
    limits = Limits(every_s=0.02, silent_s=0.2, hung_s=0.3)

    def say(text):  # before, at any time, that the neighbour is hung
        if text.startswith(f"rank 1 is dead: process {dead.pid}"):
            dead_is_named.set()

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with Heart(tmp_path, 0, 3, limits, is_waiting=lambda: True, say=say):
        with Heart(tmp_path, 1, 3, limits, on_hung=hung.set, say=say) as neighbour:
            assert hung.wait(60)  # no progress, and it waits for nobody
            with neighbour.long_work():
                pass
        assert not (tmp_path / "heartbeats/1").exists()
        (tmp_path / "heartbeats").mkdir(exist_ok=True)
        beat = {"rank": 1, "pid": dead.pid, "host": os.uname().nodename, "count": 1, "progress": 1, "waiting": False}
        (tmp_path / "heartbeats/1").write_text(json.dumps(beat))
        assert dead_is_named.wait(60)
        (tmp_path / "heartbeats/1").unlink()
    assert not (tmp_path / "heartbeats").exists()


# Corrupted replicas.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_any_flipped_bit_changes_the_hash(dtype):
    draw = random.Random(4)
    x = (torch.randn(3000) * 50).to(dtype)
    usual = hash_tensor(x)
    for _ in range(200):
        raw = bytearray(x.view(torch.uint8).numpy().tobytes())
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        assert hash_tensor(torch.frombuffer(raw, dtype=dtype)) != usual
    swapped = x.clone()
    swapped[[0, 1]] = x[[1, 0]]
    assert torch.equal(swapped, x) or hash_tensor(swapped) != usual


def test_hashes_do_not_depend_on_chunks(monkeypatch):
    x = torch.randn(100, 7)
    usual = hash_tensor(x.t())
    monkeypatch.setattr("minillm.train.fault_tolerance.replica_check.CHUNK", 64)
    assert hash_tensor(x.t()) == usual != hash_tensor(x)


def test_the_majority_is_right():
    good, bad = {"a": 1, "b": 2}, {"a": 1, "b": 3}
    assert divergence([good, good]) is None
    assert str(divergence([good, bad, good])) == "rank 1 differs from the other replicas in b"
    assert "replicas on ranks 0, 1 differ in b, and none" in str(divergence([good, bad]))


# Ranks in a run: one launch for several claims.


def one_of_three(group, folder, layout):
    """A straggler by injected times, a corrupted weight before a save, and a lock that somebody holds."""
    parallel = make_strategy(group, layout)
    watch, named = HealthMonitor(parallel, folder), []
    for step in range(20):
        slow = 3.0 if group.rank == 1 and step >= 2 else 1.0
        named += [(step, each.rank) for each in watch.after_step(StepTime(9.0, forward=slow, communication=9.0 - slow))]
    found = {"slow": named}
    found["refused"] = refusal(lambda: fit(trainer(parallel), folder / "used", **QUIET))

    def flip(run, step):
        if step.step == 6 and group.rank == 2:
            with torch.no_grad():
                run.model.blocks[1].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1 << 20

    run = trainer(make_strategy(group, layout))
    assert check_replicas(run.model.named_parameters(), group) is None
    found["corrupted"] = refusal(lambda: fit(run, folder / "flipped", save_every=4, on_step=flip, **QUIET))
    return found


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.full)])
def test_ranks_name_the_slow_and_the_corrupted_one(tmp_path, zero):
    with locked(tmp_path / "used"):
        for found in launch(one_of_three, 3, tmp_path, ParallelConfig(dp=3, zero=zero)):
            assert found["slow"] == [(9, 1)]  # within 20 steps
            assert f"is in use by process {os.getpid()}" in found["refused"]
            if zero == 0:
                assert found["corrupted"].startswith("rank 2 differs from the other replicas in model/blocks.1")
    if zero == 0:
        assert [row["step"] for row in read_metrics(tmp_path / "flipped")] == list(range(8))  # at the next save
        assert read_goodput(tmp_path / "flipped").attempts == 1


# Loss spikes.


def test_skipped_windows_are_listed_and_outlive_the_run(tmp_path):
    seen = []

    def spoil(run, step):
        seen.append(step)
        if len(seen) in (9, 12):
            with torch.no_grad():
                run.model.norm.weight.fill_(float("nan"))

    run = trainer(spike_nats=1.0)
    run.loss_spikes.every = 5
    fit(run, tmp_path, on_step=spoil, **QUIET)
    (first, bad) = (step for step in seen if step.skipped)
    assert first.skipped == (10, 20) and bad.skipped == (10, 26)  # to the same snapshot, which the second one widens
    assert run.loss_spikes.skipped == [bad.skipped]
    assert "without windows 10 to 19" in first.rollback
    again = trainer(spike_nats=1.0)
    again.load_state_dict(run.state_dict())
    assert again.loss_spikes.skipped == run.loss_spikes.skipped
    rows = [row for row in read_metrics(tmp_path) if row.get("skipped")]
    assert [row["skipped"] for row in rows] == [list(first.skipped), list(bad.skipped)]
    lost = read_goodput(tmp_path)
    undone = sum(step.time.total for step in seen if any(a <= step.position < b for a, b in run.loss_spikes.skipped))
    assert lost.lost == pytest.approx(undone, abs=1e-4)


# Time.


def test_every_second_is_counted_once(tmp_path):
    now = [1000.0]

    def clock():
        return now[0]

    with TimeLog(tmp_path, 0, clock=clock) as log:
        now[0] += 5  # it loads
        for step in range(4):
            now[0] += 2
            log.step(step, 2.0)
            if step == 1:
                with log.timing("save", 2):
                    now[0] += 1
    now[0] += 7  # it was killed in step 4, and torchrun starts it again
    with TimeLog(tmp_path, 2, clock=clock) as log:
        now[0] += 3
        for step in range(2, 5):
            now[0] += 2
            log.step(step, 2.0)
        with log.timing("validate", 5):
            now[0] += 4
        log.ended_at = 5
    found = read_goodput(tmp_path)
    assert found == Goodput(useful=10, saving=1, lost=4, restarting=10, other=5 + 4, attempts=2)
    assert found.total == now[0] - 1000 and found.share == 10 / 34
    now[0] += 1e6  # it was ended on purpose: this time is nobody's
    with TimeLog(tmp_path, 5, clock=clock) as log:
        now[0] += 3
        log.step(5, 2.0)
    assert read_goodput(tmp_path) == replace(found, useful=12, other=10, attempts=3)
    with TimeLog(tmp_path, 6, is_restart=True, clock=clock, since=lambda: 1000.0) as log:
        now[0] += 3
        log.step(6, 2.0)
    assert read_goodput(tmp_path).restarting == 11
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "st')
    assert read_goodput(tmp_path).useful == 14 and "useful" in str(read_goodput(tmp_path))
    (tmp_path / FILE).write_text("[1]\n")
    with pytest.raises(ValueError, match="does not hold the times of a run"):
        read_goodput(tmp_path)
    assert read_goodput(tmp_path / "none") is None and str(Goodput()) == "no time spent yet"


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6))
def test_parts_add_up_to_the_whole_whatever_dies_when(attempts):
    rows, at, done = [], 0.0, 0
    for steps, back, gap in attempts:
        done = max(0, done - back)
        at += gap
        rows.append({"event": "begin", "step": done, "at": at, "seconds": 0.0})
        for _ in range(steps):
            at += 1.5
            rows.append({"event": "step", "step": done, "at": at, "seconds": 1.0})
            done += 1
    found = goodput(rows)
    assert found.total == pytest.approx(at - rows[0]["at"]) and found.useful == done
    assert found.lost == sum(steps for steps, _, _ in attempts) - done


# Changing the number of ranks.


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 40))
def test_a_step_keeps_its_windows_or_the_ranks_are_refused(microbatches, batch_size, dp):
    windows = microbatches * batch_size
    if dp in possible_ranks(windows, batch_size):
        assert accumulate_for(windows, batch_size, dp) * batch_size * dp == windows
    else:
        with pytest.raises(ValueError, match=f"the {windows} windows of a step do not divide over {dp} data-parallel"):
            accumulate_for(windows, batch_size, dp)
