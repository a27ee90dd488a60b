"""With a GPU for each rank: the oracle, the labs' scripts, a profiled step of each layout and checkpoints, on NCCL.

Every test takes as many of the GPUs as it needs and is skipped where there are fewer; `make cuda` gathers them. Where
NCCL lets ranks share a GPU, four share it and take turns, so that nobody asks what is hidden.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minillm.bench import layouts
from minillm.bench.shapes import SHAPES
from minillm.comm import Group, launch
from minillm.comm.launch.device import may_share
from minillm.equivalence import compare
from minillm.train.checkpoint import reader
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import Hybrid, make_strategy
from tests.engine.train import checkpoint_programs

ROOT = Path(__file__).parents[3]
SHARED = torch.cuda.is_available() and may_share()
GPUS = max(4 * SHARED, torch.cuda.device_count())  # places for ranks
MOST = max((n for n in (2, 4, 8) if n <= GPUS), default=2)  # ranks of a script
SCRIPTS = sorted((ROOT / "solutions" / "torchrun").glob("[0-9][0-9]_*.py"))
pytestmark = pytest.mark.cuda

ORACLE = {
    2: [
        *(ParallelConfig(dp=2, zero=zero, accumulate=2) for zero in range(4)),
        ParallelConfig(tp=2),
        ParallelConfig(tp=2, sequence=True),
        *(ParallelConfig(pp=2, accumulate=4, schedule=name) for name in ("1f1b", "interleaved", "zero_bubble_v")),
        *(ParallelConfig(cp=2, context=name, pad=True) for name in ("ring", "zigzag", "ulysses", "gather")),
        ParallelConfig(dp=2, ep=2),
    ],
    4: [
        ParallelConfig(dp=2, tp=2, sequence=True, zero=3),
        ParallelConfig(dp=2, pp=2, accumulate=2, zero=1),
        ParallelConfig(dp=2, cp=2, zero=2, pad=True),
        ParallelConfig(dp=4, dp_replicate=2, zero=3),
        ParallelConfig(dp=4, ep=2, zero=3),
    ],
    8: [
        ParallelConfig(dp=2, pp=2, tp=2, sequence=True, accumulate=2),
        ParallelConfig(dp=2, cp=2, tp=2, zero=3, pad=True),
        ParallelConfig(dp=4, ep=4, pp=2, accumulate=2),
    ],
}
LEAST_HIDDEN = {"dp": 0.3, "fsdp": 0.3, "cp, zigzag": 0.2}  # share of the time in which NCCL's kernels run


def of_ranks(counts) -> list:
    """Parameters of a test: numbers of ranks, skipped where there are fewer GPUs."""
    return [
        pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"it needs {n} GPUs, and there are {GPUS}"))
        for n in counts
    ]


def make_nccl_strategy(group: Group, layout: ParallelConfig) -> Hybrid:
    assert group.backend == "nccl" and group.device.type == "cuda", group
    return make_strategy(group, layout)


@pytest.mark.parametrize("world_size", of_ranks(ORACLE))
def test_every_layout_has_the_gradients_of_one_process(world_size):
    rows = compare(ORACLE[world_size], strategy=make_nccl_strategy)
    assert not [row for row in rows if not row.ok]
    assert len(rows) >= len(ORACLE[world_size])


@pytest.mark.parametrize("world_size", of_ranks([MOST]))
@pytest.mark.parametrize("script", [pytest.param(path, id=path.stem) for path in SCRIPTS])
def test_a_labs_script_under_torchrun(script, world_size):
    """Solved: labs/torchrun/ has the same script with the answers taken out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), str(script)]
    environment = os.environ | {"NCCL_DEBUG": "VERSION", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert " ok" in done.stdout and " off" not in done.stdout, done.stdout
    assert "NCCL version" in done.stdout + done.stderr  # its messages went through NCCL


@pytest.mark.parametrize("world_size", of_ranks(n for n in layouts.LAYOUTS if n > 1))
def test_steps_agree_and_hide_their_communication(world_size):
    """Four layers of the 1B shape: the same loss on all ranks and in all layouts with the same data, and where a form
    of parallelism promises to send while it computes, a profile shows that it does."""
    losses, hidden = {}, {}
    for name, layout in layouts.LAYOUTS[world_size].items():
        model, seq_len, precision = layouts.setting(layout, "cuda")
        model = replace(model, num_layers=max(4, layout.pp))
        ranks = launch(layouts.measure, world_size, layout, model, seq_len, precision, 3, timeout=120, device="cuda")
        found = layouts.slowest(ranks)
        assert math.isfinite(found.loss), f"{name}: ranks differ, or the loss is not finite: {[r.loss for r in ranks]}"
        assert found.hidden is not None, f"{name}: NCCL ran no kernel"
        losses[name], hidden[name] = found.loss, found.hidden
    assert losses["dp"] == pytest.approx(losses["fsdp"], abs=0.02)
    if SHARED:
        return
    too_little = {name: hidden[name] for name, least in LEAST_HIDDEN.items() if hidden[name] < least}
    assert not too_little, f"{too_little} of the time in which NCCL's kernels ran; of all layouts: {hidden}"


@pytest.mark.parametrize("world_size", of_ranks([4]))
def test_a_checkpoint_restores_in_every_other_layout(world_size, tmp_path):
    chosen = [each for each in checkpoint_programs.LAYOUTS if each.world_size <= world_size][:6]
    ranks = launch(
        checkpoint_programs.through_all, world_size, tmp_path, chosen, "bf16-master", timeout=200, device="cuda"
    )
    wrong = [(source, target, names) for rank in ranks for source, target, names, *_ in rank if names]
    assert not wrong
    assert len({(source, target) for rank in ranks for source, target, *_ in rank}) == len(chosen) ** 2


@pytest.mark.parametrize("world_size", of_ranks([2]))
def test_a_checkpoint_of_two_gpus(world_size, tmp_path):
    chosen = [ParallelConfig(dp=2, zero=3), ParallelConfig(tp=2), ParallelConfig(pp=2, accumulate=2), ParallelConfig()]
    ranks = launch(checkpoint_programs.through_all, world_size, tmp_path, chosen, "fp32", timeout=200, device="cuda")
    assert not [names for rank in ranks for _, _, names, *_ in rank if names]
    assert reader.has_checkpoint(tmp_path / "start")


def test_the_tests_here_need_what_exists():
    """Without GPUs: scripts, shapes and layouts that the tests above name are there."""
    assert len(SCRIPTS) == len(list((ROOT / "labs" / "torchrun").glob("[0-9][0-9]_*.py"))) >= 11
    assert layouts.GPU[0] in SHAPES and set(LEAST_HIDDEN) <= set(layouts.LAYOUTS[8]) & set(layouts.LAYOUTS[2])
    assert all(layout.world_size == n for n, chosen in ORACLE.items() for layout in chosen)
    for world_size, chosen in layouts.LAYOUTS.items():
        for layout in chosen.values():
            model, seq_len, _ = layouts.setting(layout, "cuda")
            layout.check(model, seq_len)
            assert layout.world_size == world_size
