"""Faults that were found by looking for them: bits flipped in what ranks share, beats of ranks long dead, recipes."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

from minillm.__main__ import parser_of, run
from minillm.cli.train import NODES_S, TIMEOUT_S
from minillm.comm import launch
from minillm.data import Tokens
from minillm.measure.ledger import Event, Ledger, Span
from minillm.model import ModelConfig, MoEConfig
from minillm.train import ParallelConfig, StepTime, TrainConfig, Trainer, fit
from minillm.train.fault_tolerance.goodput import TimeLog, read_goodput
from minillm.train.fault_tolerance.heartbeat import FOLDER, Beat, Health, HealthMonitor, Limits, Process, Watcher
from minillm.train.fault_tolerance.straggler import own_work
from minillm.train.metrics import read_metrics
from minillm.train.run import STOP
from minillm.train.strategies.hybrid import Hybrid, make_strategy

MODEL = ModelConfig(50, 16, 32, 2, 4, 2, max_seq_len=16, tie_embeddings=True)
MOE = replace(MODEL, moe=MoEConfig(4, 2, 16, bias_update_rate=0.01))
QUIET = {"progress": False, "tensorboard": False}


def trainer(parallel=None, model=MODEL, **options):
    text = Tokens((torch.arange(4000) * 7 % 50).numpy().astype("uint16"), 50, 0, 1, 12000)
    options = {"seq_len": 16, "batch_size": 2, "steps": 12, "warmup_steps": 2, "spike_nats": 2.0} | options
    return Trainer(TrainConfig(model, **options), text, workers=0, parallel=parallel)


# Corrupted replicas.


def refused(group, folder, layout, model, name):
    """What a run says in which the last bit of `name` on rank 1 has been flipped before a save."""

    def flip(run, step):
        if step.step == 7 and group.rank == 1:
            tensors = run.local_state().tensors
            flipped = next(tensor for each, tensor in tensors.items() if each.endswith(name)).view(-1)
            flipped.view(torch.int32)[flipped.abs().argmax()] ^= 1

    try:
        fit(trainer(make_strategy(group, layout), model), folder, save_every=4, on_step=flip, **QUIET)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "layout, model, name",
    [
        (ParallelConfig(dp=2), MODEL, "exp_avg_sq/blocks.1.mlp.up_proj.weight"),  # too little to move the weight
        (ParallelConfig(dp=2), MOE, "balance_bias"),  # a buffer, which checkpoints hold as well
        (ParallelConfig(tp=2), MODEL, "blocks.0.attention_norm.weight"),  # both ranks have the whole of it
        (ParallelConfig(pp=2, accumulate=2), MODEL, "embedding.weight"),  # tied: both ends of the pipeline have it
    ],
)
def test_a_bit_flipped_in_what_ranks_share_is_named_along_any_axis(tmp_path, layout, model, name):
    for said in launch(refused, 2, tmp_path, layout, model, name):
        assert said and "the replicas on ranks 0, 1 differ in" in said and name in said


# Loss spikes.


def test_a_loaded_state_forgets_the_snapshots_of_other_weights():
    used, other = trainer(), trainer()
    other.step()
    for _ in range(8):
        used.step()
    used.load_state_dict(other.state_dict())
    assert used.step().step == 1 and used.step().step == 2
    with torch.no_grad():
        used.model.norm.weight.fill_(float("nan"))
    assert "back to step 1," in used.step().rollback and used.steps_done == 1


def spoilt(run, positions):
    """A batch at one of these positions of the data gives a loss that is not finite."""
    backward = run.backward

    def spoil():
        is_bad = run.loader.position in positions
        loss, tokens = backward()
        return (loss * float("nan") if is_bad else loss), tokens

    run.backward = spoil
    return run


class Killed(Exception):
    pass


def killed_after(steps):
    def end(run, step):
        nonlocal steps
        steps -= 1
        if steps == 0:
            raise Killed

    return end


def test_a_bad_batch_right_after_the_checkpoint_is_skipped(tmp_path):
    with pytest.raises(Killed):
        fit(trainer(), tmp_path, save_every=4, on_step=killed_after(6), **QUIET)
    run = spoilt(trainer(), {8, 10})
    assert fit(run, tmp_path, resume=True, save_every=4, **QUIET).steps_done == 12
    assert run.loss_spikes.skipped == [(8, 12)] and run.loader.position == 2 * (12 + 2)
    with pytest.raises(ValueError, match="in the very first step"):
        spoilt(trainer(), {0}).step()
    run = spoilt(trainer(), range(1000))  # the checkpoint itself is bad
    with pytest.raises(ValueError, match="also after going back to step 4 3 times"):
        run.load_state_dict(good_state(4))
        [run.step() for _ in range(4)]


def good_state(steps):
    run = trainer()
    [run.step() for _ in range(steps)]
    return run.state_dict()


@pytest.mark.parametrize("lived, kept", [(11, [0, 1, 2, 3, 4, 5, 6, 7]), (14, [*range(10), 5, 6, 7])])
def test_metrics_hold_what_the_checkpoint_knows_also_after_a_rollback(tmp_path, lived, kept):
    """Step 9 goes back to 5. Killed before the next save: what came after the last one is lost; killed after it: the
    steps that the rollback undid stay, and the windows that it skipped."""
    run = spoilt(trainer(steps=20), {18})
    run.loss_spikes.every = 5
    with pytest.raises(Killed):
        fit(run, tmp_path, save_every=4, on_step=killed_after(lived), **QUIET)
    run = trainer(steps=20)
    fit(run, tmp_path, resume=True, save_every=4, **QUIET)
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert [row["step"] for row in rows][: len(kept)] == kept
    assert [row["position"] for row in rows] == [2 * index for index in range(len(rows))]
    assert run.loss_spikes.skipped == [tuple(row["skipped"]) for row in rows if row["skipped"]]


# Stopping.


def test_a_request_to_stop_that_comes_before_the_ranks_have_started_counts(tmp_path):
    (tmp_path / STOP).touch()
    done = fit(trainer(), tmp_path, lock=False, **QUIET)
    assert done.interrupted and done.steps_done == 0 and not (tmp_path / STOP).exists()
    (tmp_path / STOP).touch()  # of a run that was killed: whoever takes the lock removes it
    assert not fit(trainer(), tmp_path, **QUIET).interrupted


# Goodput.


@pytest.mark.parametrize("agent_began, restarting", [(1000.0, 53.0), (1040.0, 0.0)])
def test_a_gap_after_an_end_counts_if_the_agent_was_there_before_it(tmp_path, agent_began, restarting):
    """An agent ends its ranks to let another node in; the next day's agent has nothing to do with the night."""
    now = [1000.0]
    for step in range(2):
        with TimeLog(tmp_path, step, is_restart=True, clock=lambda: now[0], since=lambda: agent_began) as log:
            now[0] += 3
            log.step(step, 0.0)
            log.ended_at = step + 1
        now[0] += 50
    assert read_goodput(tmp_path).restarting == restarting


# Slow ranks.


def test_waiting_between_spans_is_no_work_of_the_rank_that_waits():
    """For a slow loader all others wait at the step's first sum, that of the tokens, which no span surrounds."""
    event = Event("all_reduce", "dp", 0, 0, (1,), "float32", 1.1, 3.9, waited=2.5)
    spans = [Span("input", "input", 0, 1), Span("forward", "compute", 4, 5)]
    found = StepTime.of(Ledger([event], spans), 5.5)
    assert (found.communication, found.idle, sum(own_work(found))) == (2.5, 1.0, 3.0)


# Heartbeats.


def test_a_stopped_rank_and_one_whose_threads_do_not_run_are_told_apart_from_one_that_makes_no_steps():
    seen = {1: Process.STOPPED, 2: Process.RUNNING}
    watcher = Watcher(Limits(every_s=1, silent_s=10, hung_s=60), lambda beat: seen[beat.rank])
    for rank in seen:
        watcher.see(Beat(rank, 100 + rank, "here", 1, 1, waiting=True), 0.0)  # in a collective
    assert {watcher.judge(rank, 20.0) for rank in seen} == {Health.HUNG}
    assert watcher.sentence(1, Health.HUNG, 20.0) == "rank 1 is hung: a signal has stopped process 101 on here"
    assert watcher.sentence(2, Health.HUNG, 20.0) == (
        "rank 2 is hung: process 102 on here runs, but has given no sign for 20 s"
    )


def beats_found(group, folder):
    with HealthMonitor(Hybrid(group, ParallelConfig(dp=group.world_size)), folder, Limits(every_s=500, silent_s=600)):
        return sorted(path.name for path in (folder / FOLDER).glob("*"))


def test_nobody_is_judged_by_the_beats_of_an_attempt_before(tmp_path):
    """Rank 1's process of then has gone, and there is no rank 3 any more."""
    (tmp_path / FOLDER).mkdir()
    for rank in (1, 3):
        beat = {"rank": rank, "pid": 1 << 30, "host": "here", "count": 1, "progress": 1, "waiting": False}
        (tmp_path / FOLDER / str(rank)).write_text(json.dumps(beat))
    assert launch(beats_found, 2, tmp_path) == [[], []]
    assert not (tmp_path / FOLDER).exists()


def test_a_rank_that_hangs_is_found_before_the_others_give_up():
    limits = Limits()
    assert limits.hung_s + 10 * limits.every_s <= TIMEOUT_S


# A number of ranks that does not divide.


def test_ranks_that_do_not_divide_wait_for_torchrun_to_change_their_number(home, capsys, monkeypatch):
    tiny = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--batch-size", "1"]
    assert run([*tiny, "--steps", "1", "--accumulate", "4", "--run", "four"]) == 0
    again = ["train", "--resume", "--run", "four", "--dp", "3"]
    sentence = (
        "the 4 windows of a step do not divide over 3 data-parallel ranks with --batch-size 1: go on with 1, 2, 4"
    )
    waited = []
    monkeypatch.setattr("minillm.cli.train.time.sleep", waited.append)
    assert run(again) == 2 and waited == []
    assert sentence in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "9")
    assert run(again) == 2 and waited == [NODES_S]  # its agent would have ended it if another node had come
    assert f"{sentence} of them; waiting for nodes to come or go\n" in capsys.readouterr().err


# Recipes.


def torchrun_lines():
    """What docs and recipes give to torchrun, with values in place of variables."""
    root = Path(__file__).parents[3]
    texts = [(root / "docs/runs.md").read_text()]
    texts += [path.read_text() for path in sorted((root / "recipes/slurm").glob("*.sbatch"))]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines() if "torchrun --" in line]
    values = {"${FEWEST_NODES:-$SLURM_NNODES}:$SLURM_NNODES": "3:4", "$SLURM_GPUS_ON_NODE": "8", "${@:-train}": "train"}
    for variable, value in values.items():
        lines = [line.replace(variable, value) for line in lines]
    [container] = [
        container
        for document in yaml.safe_load_all((root / "recipes/kubernetes/train.yaml").read_text())
        if document["kind"] == "Job"
        for container in document["spec"]["template"]["spec"]["containers"]
    ]
    return [*(shlex.split(line.partition("torchrun")[2]) for line in lines), container["args"]]


def test_recipes_name_options_that_exist():
    given = torchrun_lines()
    assert len(given) == 4
    for arguments in given:
        options = get_args_parser().parse_args([*arguments, "--run", "x", "--node", "2"])  # torchrun leaves them alone
        assert options.training_script == "minillm" and options.module
        command, *rest = options.training_script_args
        parser_of(command).make_context(command, rest)  # refuses options that there are not
