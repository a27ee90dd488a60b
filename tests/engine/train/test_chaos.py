"""SIGKILL at random instants, saves included: nothing is lost, nothing is seen twice, and the bits are the same.

A sample runs here; MINILLM_PROOF=all kills 200 times.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from chaos_program import STEPS, WINDOWS

import minillm
from minillm.data.sampler import ShardedSampler

KILLS, RANK_KILLS = (160, 40) if os.environ.get("MINILLM_PROOF") == "all" else (10, 4)  # of ranks: half per strategy


@pytest.mark.full
def test_killed_often_and_none_the_worse(tmp_path):
    program = Path(__file__).with_name("chaos_program.py")
    environ = os.environ | {"PYTHONPATH": str(Path(minillm.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    seed = int.from_bytes(os.urandom(2), "big")
    command = [sys.executable, str(program), str(tmp_path), str(KILLS), str(RANK_KILLS), str(seed)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, (seed, done.stderr[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS + RANK_KILLS, seed

    for name in ("alone", "pair0", "pair2"):
        whole = rows(tmp_path / ("whole-done-0" if name == "alone" else f"{name}-whole-done-0"))
        finished = sorted(tmp_path.glob(f"{name}-done-*"))
        assert finished and all(rows(folder) == whole for folder in finished), seed  # bit-equal losses, in order
        positions = [position for position, _ in whole]
        assert positions == [12 * step for step in range(STEPS)]
    sampler = ShardedSampler(WINDOWS, 12)
    seen = np.concatenate([sampler.indices(position) for position in positions])
    assert len(set(seen.tolist())) == STEPS * 12


def rows(folder):
    return json.loads((folder / "rows.json").read_text())
