"""Several ranks save and restore together: what they tell each other, and what each of them does for all."""

import re

import checkpoint_programs as programs
import pytest

from minillm.comm import launch
from minillm.train.checkpoint.manifest import Manifest, committed


@pytest.mark.full
def test_a_save_waits_for_nobody_unless_a_state_was_loaded_or_parts_are_new(tmp_path):
    ranks = launch(programs.saves_in_a_row, 2, tmp_path, timeout=120)
    planned = [("gather_objects", (0,))]
    saves = {
        "first": planned,
        "same parts": [],
        "rolled back, (1,) without moments": planned,
        "they came to (1,)": [],
        "after they came to (1,)": planned,
        "rolled back, (0, 1) without moments": planned,
        "they came to (0, 1)": [],
        "after they came to (0, 1)": planned,
        "room again": planned,
    }
    for found in ranks:
        assert found.pop("left") == ["save-0008-step-15", "save-0009-step-16"]
        refused = "; the checkpoint that was there still loads."
        assert found.pop("full disk").endswith("No space left on device)" + refused)
        assert re.search(
            r"\(of optimizer/exp_avg\S+ the ranks hold \d+ of \d+ bytes\)" + refused, found.pop("parts gone")
        )
        assert list(found) == list(saves)
        for number, (name, (checkpoint, wrong, collectives)) in enumerate(found.items(), 1):
            assert not wrong, (name, wrong)
            assert collectives == saves[name], name
            assert checkpoint.startswith(f"save-{number:04d}-step-"), name


@pytest.mark.full
def test_replicas_share_the_checking_and_all_refuse_a_flipped_bit(tmp_path):
    checked, said = zip(*launch(programs.restored_together, 2, tmp_path, timeout=120), strict=True)
    nbytes = Manifest.read(committed(tmp_path)[-1]).nbytes
    assert sum(checked) == nbytes and max(checked) <= 0.51 * nbytes
    assert said[0] == said[1] and len(said[0]) == 16
    assert all("is damaged: the checksum of" in problem for problem in said[0][::2])
    assert all(problem is None for problem in said[0][1::2])
