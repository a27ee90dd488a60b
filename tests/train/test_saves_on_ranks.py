"""Several ranks save and restore together: what they tell each other, and what each of them does for all."""

import checkpoint_programs as programs
import pytest

from minillm.comm import launch
from minillm.train.checkpoint.manifest import Manifest, committed


@pytest.mark.slow
def test_a_save_waits_for_one_small_collective_unless_parts_have_changed(tmp_path):
    ranks = launch(programs.saves_in_a_row, 2, tmp_path, timeout=120)
    agreed, planned = ("all_reduce", (2,)), ("gather_objects", (0,))
    saves = {
        "first": ("save-0001-step-1", [agreed, planned]),
        "same parts": ("save-0002-step-3", [agreed]),
        "other tensors": ("save-0003-step-5", [agreed]),
        "other parts": ("save-0004-step-7", [agreed, planned]),
        "room again": ("save-0005-step-10", [agreed, planned]),
    }
    for found in ranks:
        assert found.pop("left") == ["save-0004-step-7", "save-0005-step-10"]
        assert "No space left on device); the checkpoint that was there still loads." in found.pop("refused")
        for name, (checkpoint, wrong, collectives) in found.items():
            assert not wrong, (name, wrong)
            assert (checkpoint, collectives) == saves[name], name
        assert found.keys() == saves.keys()


@pytest.mark.slow
def test_replicas_share_the_checking_and_all_refuse_a_flipped_bit(tmp_path):
    checked, said = zip(*launch(programs.restored_together, 2, tmp_path, timeout=120), strict=True)
    nbytes = Manifest.read(committed(tmp_path)[-1]).nbytes
    assert sum(checked) == nbytes and max(checked) <= 0.51 * nbytes
    assert said[0] == said[1] and len(said[0]) == 16
    assert all("is damaged: the checksum of" in problem for problem in said[0][::2])
    assert all(problem is None for problem in said[0][1::2])
