"""The Slurm recipes, run by Slurm on two nodes of this machine: losses of one process; on after a signal."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster

from minillm.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "slurm"
TINY = ("train", "--model-size", "tiny", "--data", "text", "--seq-len", "32", "--lr", "0.003", "--device", "cpu")
PATIENCE_S = 900


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.sbatch")), ids=lambda path: path.stem)
def test_a_recipe_is_a_script_that_bash_reads(recipe):
    assert subprocess.run(["bash", "-n", str(recipe)], capture_output=True, text=True).stderr == ""
    assert recipe.read_text().startswith("#!/bin/bash\n")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if found := slurm_cluster.missing():
        pytest.skip(f"{', '.join(found)} not installed (Debian: slurmctld slurmd slurm-client munge)")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        cluster.environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PET_LOCAL_ADDR": "127.0.0.1",  # both nodes are this machine, whatever it is called
            "OMP_NUM_THREADS": "1",
        }
        yield cluster


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "zen.txt").write_text(
        "Beautiful is better than ugly. Explicit is better than implicit.\n" * 200
    )
    return tmp_path


def losses(folder, run):
    return [row["loss"] for row in read_metrics(folder / "runs" / run) if "loss" in row]  # others are of validation


def alone(folder, *arguments):
    """Losses of one process on the same windows of text."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "minillm", *TINY, "--run", "alone", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=PATIENCE_S)
    return losses(folder, "alone")


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "nodes"), [("one_node", 1), ("several_nodes", 2)])
def test_a_recipe_trains_like_one_process(slurm, folder, recipe, nodes):
    ranks = 2 * nodes
    job = slurm.submit(
        folder, f"--nodes={nodes}", "--gpus-per-node=2", "--job-name=night", str(RECIPES / f"{recipe}.sbatch"),
        *TINY, "--steps", "6", "--batch-size", "1", "--zero", "2",
    )  # fmt: skip
    assert slurm.wait(job, PATIENCE_S) == "COMPLETED", (folder / f"job-{job}.log").read_text()[-3000:]
    expected = alone(folder, "--steps", "6", "--batch-size", str(ranks))
    found = losses(folder, "tiny-1")
    assert len(found) == 6
    assert all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(found, expected, strict=True))


@pytest.mark.full
def test_a_job_that_is_told_to_end_saves_and_goes_on_when_it_is_submitted_again(slurm, folder):
    line = ["--nodes=2", "--gpus-per-node=1", "--job-name=long", str(RECIPES / "several_nodes.sbatch"), *TINY]
    line += ["--steps", "100000", "--save-every", "100000"]

    def run_until(steps):
        """The job is told what Slurm tells every process of a step before the time is up."""
        job = slurm.submit(folder, *line)
        metrics, give_up_at = folder / "runs" / "tiny-1" / "metrics.jsonl", time.monotonic() + PATIENCE_S
        while not metrics.exists() or len(losses(folder, "tiny-1")) < steps:
            assert time.monotonic() < give_up_at, (folder / f"job-{job}.log").read_text()[-3000:]
            time.sleep(0.5)
        slurm.ask("scancel", "--signal=TERM", job)
        slurm.wait(job, PATIENCE_S)
        return len(losses(folder, "tiny-1"))

    first = run_until(5)
    saved = list((folder / "runs" / "tiny-1" / "checkpoints").glob("save-*"))
    assert [int(path.name.rpartition("-")[2]) for path in saved] == [first]
    steps = [row["step"] for row in read_metrics(folder / "runs" / "tiny-1") if "loss" in row]
    run_until(first + 5)
    again = [row["step"] for row in read_metrics(folder / "runs" / "tiny-1") if "loss" in row]
    assert again[:first] == steps and again == list(range(len(again)))  # nothing lost, nothing repeated
    assert [path.name for path in (folder / "runs").iterdir() if path.is_dir()] == ["tiny-1"]
