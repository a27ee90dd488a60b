"""Lab 10's disk, formulas and pictures: what its answers claim in words follows from `predict.faults`."""

import pytest

from course.lab10_fault_tolerance import experiments, receipts
from course.lab10_fault_tolerance import experiments_breaks as breaks
from course.lab10_fault_tolerance import figures as pictures
from course.lab10_fault_tolerance.disk import CUTS, Disk, InterleavedRanks
from minillm.predict import faults


def test_a_power_cut_keeps_what_was_flushed():
    disk = Disk()
    disk.write("draft/0", b"abcdef")
    disk.write("draft/1", b"uvwxyz")
    disk.flush("draft/0")
    disk.rename("draft", "step-1")
    everything, names, flushed = (disk.after_a_cut(cut) for cut in CUTS)
    assert everything.read("step-1/1") == b"uvwxyz"
    assert (names.read("step-1/0"), names.read("step-1/1")) == (b"abcdef", b"uvw")
    assert flushed.list() == ["draft"] and flushed.list("draft") == ["0"]
    disk.flush(".")
    assert disk.after_a_cut(CUTS[2]).list() == ["step-1"]
    with pytest.raises(FileNotFoundError):
        disk.rename("draft", "elsewhere")


def test_a_new_name_lasts_once_the_folder_above_is_flushed():
    disk = Disk()
    disk.write("draft/0", b"abcdef")
    disk.flush("draft/0")
    disk.rename("draft", "step-1")
    disk.flush("step-1")  # the names in it, which stand in a folder that the disk knows as draft
    disk.flush("step-1/0")
    assert disk.copy().after_a_cut(CUTS[2]).list() == ["draft"]
    disk.flush(".")
    assert disk.after_a_cut(CUTS[2]).list() == ["step-1"]
    disk.rename("step-1/0", "step-1/1")
    disk.flush("step-1")
    assert disk.after_a_cut(CUTS[2]).list("step-1") == ["1"]


def test_a_file_that_is_replaced_in_place_is_old_new_or_torn():
    disk = Disk()
    disk.write("latest", b"step 1")
    disk.flush("latest")
    disk.write("latest", b"step 2")
    assert [disk.after_a_cut(cut).read("latest") for cut in CUTS] == [b"step 2", b"ste", b"step 1"]


def test_a_rank_that_is_killed_stops_those_that_wait_for_it():
    def program(group, disk):
        disk.write(str(group.rank), b"x")
        group.barrier()
        disk.write(f"after-{group.rank}", b"x")

    disk = Disk()
    played = InterleavedRanks(disk, (0, 1, 2), victim=1, victim_after=0).play(program)
    assert disk.list() == ["0", "2"] and not played.returned
    disk = Disk()
    played = InterleavedRanks(disk, (2, 1, 0)).play(program)
    assert len(played.returned) == 3 and [rank for rank, _ in played.operations] == [2, 1, 0, 2, 1, 0]
    assert len(InterleavedRanks(Disk(), (0, 1), stop_after=3).play(program).operations) == 3


def test_the_numbers_of_the_design_answers():
    rows = {cells[0]: cells[1:] for cells in receipts.design_interval().rows}
    assert (
        rows["foreground, Young's interval"] == ("1,323 s", "9.82 s", "2.0%") and rows["restarts alone"][-1] == "0.5%"
    )
    assert float(rows["background, every 5 min"][-1][:-1]) < 0.8
    levers = [[float(cell[:-1]) for cell in cells[2:]] for cells in receipts.design_lever().rows]
    assert levers[0] == [10.1, 4.3, 14.4]
    assert max(levers[1][0], levers[2][0]) < levers[1][1]  # faster storage, background: the restart is the largest part
    assert faults.checkpoint_bytes(405e9) / 16384 == pytest.approx(350e6, rel=0.02)
    mtbf = faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, 8)
    assert mtbf > 180 * 86400 and faults.goodput(3600, 60, 600, mtbf) > 0.98


def test_a_forgotten_part_is_not_a_rounding_error():
    found = {part: breaks.left_out(part, steps=6)[1] for part in ("weights", "optimizer", "order of the data")}
    assert min(found.values()) > 0.01


def test_time_is_shared_out_as_goodput_does():
    events = [("begin", 0, 0, 0), ("step", 0, 2, 1), ("save", 1, 3, 1), ("step", 1, 5, 2), ("begin", 1, 9, 0)]
    events += [("step", 1, 12, 2), ("end", 2, 12, 0)]
    names = ("event", "step", "at", "seconds")
    first, second = pictures.spans([dict(zip(names, event, strict=True)) for event in events])
    assert first == [("useful", 1, 2), ("saving", 2, 3), ("lost", 3, 5)]
    assert second == [("restarting", 5, 10), ("useful", 10, 12)]


@pytest.mark.parametrize("save_s", [1, 60, 300])
def test_the_pictures_draw(save_s):
    assert len(pictures.goodput_by_gpus(save_s=save_s).axes[0].lines) == 4
    assert pictures.draw_schedules().axes[0].lines
    found = experiments.intervals()
    assert pictures.draw_intervals(found).axes[0].collections
