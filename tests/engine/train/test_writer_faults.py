"""A save that fails is heard at once by all ranks, leaves nothing behind, and claims nothing that is not so."""

import errno
import os
import shutil
import time
from pathlib import Path

import checkpoint_programs as programs
import pytest
import torch

from minillm.comm import launch
from minillm.train.checkpoint import manifest, writer
from minillm.train.checkpoint.manifest import committed
from minillm.train.checkpoint.writer import Checkpointer
from minillm.train.parallel_config import ParallelConfig

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refuse(*_: object, **__: object) -> None:
    raise FULL


def a_save_that_fails(group, folder: Path, how: str) -> tuple[str, list[str]]:
    """What the second save says, and what is in the folder then. how: "mute", rank 1 can write neither its part nor a
    note; "early", rank 0 fails while rank 1 still writes."""
    torch.set_num_threads(1)
    ours, saver = programs._spread(group, ParallelConfig(dp=2)), Checkpointer(folder, group, timeout_s=3600)
    ours.step()
    saver.save(ours)
    parts, note = writer.write_parts, writer.write_whole

    def slow(*given: object) -> object:
        time.sleep(0.3)
        return parts(*given)

    if how == "mute" and group.rank == 1:
        writer.write_parts = writer.write_whole = _refuse
    if how == "early":
        writer.write_parts = slow if group.rank else _refuse
    said = ""
    try:
        saver.save(ours)
    except OSError as error:
        said = str(error)
    writer.write_parts, writer.write_whole = parts, note
    group.barrier()
    return said, sorted(path.name for path in saver.folder.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("how", ["mute", "early"])
def test_all_ranks_hear_of_a_failure_and_no_draft_stays(how, tmp_path):
    for said, left in launch(a_save_that_fails, 2, tmp_path, how, timeout=120):
        assert "No space left on device); the checkpoint that was there still loads." in said
        assert left == ["save-0001-step-1"]


def an_unlistable_folder(group, folder: Path) -> str:
    torch.set_num_threads(1)
    ours = programs._spread(group, ParallelConfig(dp=2))
    if group.rank == 0:
        manifest.os = type("os", (), {"listdir": staticmethod(_refuse)})
    with pytest.raises(OSError) as error:
        Checkpointer(folder, group).save(ours)
    return str(error.value)


@pytest.mark.full
def test_all_ranks_hear_that_checkpoints_cannot_be_listed(tmp_path):
    first, second = launch(an_unlistable_folder, 2, tmp_path, timeout=120)
    assert first.startswith("cannot save to") and "No space left on device)" in first
    assert second.startswith("cannot save to") and "No space left on device)" in second


def test_a_checkpoint_that_was_replaced_by_a_link_does_not_end_all_saving(tmp_path):
    ours, saver = programs.trainer(), Checkpointer(tmp_path / "run", keep=1)
    saver.save(ours)
    (old,), elsewhere = committed(tmp_path / "run"), tmp_path / "elsewhere"
    shutil.move(old, elsewhere)  # to a larger disk
    os.symlink(elsewhere, old)
    for each in (saver, Checkpointer(tmp_path / "run", keep=1)):
        ours.step()
        each.save(ours)
    assert elsewhere.is_dir() and [path.name for path in saver.folder.iterdir()] == ["save-0003-step-2"]


def test_a_first_save_that_fails_offers_no_checkpoint(tmp_path):
    ours, saver = programs.trainer(), Checkpointer(tmp_path / "run")
    saver._write_parts = programs._no_room
    with pytest.raises(OSError) as error:
        saver.save(ours)
    assert str(error.value).endswith("No space left on device).")


def test_a_note_that_was_damaged_on_the_way_is_not_signed(tmp_path):
    ours, saver = programs.trainer(), Checkpointer(tmp_path / "run")
    ours.step()
    notes = saver._notes

    def flipped(draft: Path) -> list:
        path = writer._note(draft, 0)
        path.write_text(path.read_text().replace('"step": 1,', '"step": 3,'))
        return notes(draft)

    saver._notes = flipped
    with pytest.raises(OSError, match=r"rank-0000.json is damaged: its checksum differs"):
        saver.save(ours)
    assert not committed(tmp_path / "run")
