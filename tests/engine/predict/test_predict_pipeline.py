"""Closed forms of pipelines by hand; tests/engine/parallel/test_schedules.py holds the schedules themselves to them."""

import subprocess
import sys

import pytest

from minillm.predict.training import pipeline


def test_idle_share_is_not_overhead():
    """P38, P39, E000-24: 27.3 % of the time, not 37.5 %; at 4 stages and 4 microbatches 43 %, not 75 %."""
    assert pipeline.idle_share(4, 8) == 3 / 11 and pipeline.overhead(4, 8) == 0.375
    assert pipeline.idle_share(4, 4) == 3 / 7 and pipeline.overhead(4, 4) == 0.75
    assert pipeline.idle_share(2, 4) == 0.20 and (1 - 4) / (4 + 2 - 1) < 0  # E003-43's formula is not a share
    assert pipeline.overhead(8, 4) > 1 > pipeline.idle_share(8, 4)
    assert pipeline.idle_share(1, 1) == 0


def test_microbatches_needed():
    """P46, E004-15: at most 25 % idle takes 3(n - 1) microbatches; 4n gives 15.8 to 19 %."""
    for stages in range(2, 40):
        assert pipeline.microbatches_needed(stages, 0.25) == 3 * (stages - 1)
        assert 0.15 < pipeline.idle_share(4, 16) <= pipeline.idle_share(stages, 4 * stages) + 0.05 < 0.25
        for share in (0.1, 0.2, 1 / 3, 0.5):
            for chunks in (1, 2, 3):
                enough = pipeline.microbatches_needed(stages, share, chunks)
                assert pipeline.idle_share(stages, enough, chunks) <= share + 1e-12
                assert enough == 1 or pipeline.idle_share(stages, enough - 1, chunks) > share
    assert pipeline.microbatches_needed(1, 0.25) == 1


def test_numbers_of_the_course():
    assert round(pipeline.idle_share(4, 8, chunks=2), 3) == 0.158  # P43
    assert pipeline.in_flight_interleaved(4, 2, 8) == 5.5 == 4 * (1 + 3 / 8)
    assert pipeline.in_flight_interleaved(4, 2, 4) == 4  # no more than there are
    assert (pipeline.sends(4, 8), pipeline.sends(4, 8, 2), pipeline.sends(1, 8, 2)) == (48, 112, 0)
    assert [pipeline.in_flight_1f1b(4, s, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [pipeline.zero_bubble_idle(n, 1, 2, 1) for n in (4, 8)] == [3, 7]  # P44
    assert [pipeline.staleness(4, s) for s in range(4)] == [3, 2, 1, 0]
    assert pipeline.makespan(4, 8, 1, 1) == 22  # E000-25: not 19


def test_bytes_depend_on_neither_microbatches_nor_layers():
    """P42: 2(n-1)·B·S·H·b."""
    assert pipeline.sent_bytes(4, 8, 128, 64, 2) == 2 * 3 * 8 * 128 * 64 * 2
    for microbatches in (1, 2, 4, 8):
        each = 8 // microbatches * 128 * 64 * 2
        for chunks in (1, 2):
            assert pipeline.sends(4, microbatches, chunks) * each == pipeline.sent_bytes(4, 8, 128, 64, 2, chunks)
    assert pipeline.sent_bytes(1, 8, 128, 64, 2, chunks=2) == 0


def test_uneven_by_hand():
    """Three stages of 1, 4, 1 (B twice that) on 5 microbatches; even stages take what `makespan` says."""
    assert pipeline.uneven_makespan([1, 4, 1], [2, 8, 2], 5) == 18 + 4 * 12
    assert pipeline.uneven_makespan([1] * 4, [2] * 4, 8) == pipeline.makespan(4, 8, 1, 2) == 33


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: pipeline.idle_share(0, 4), "stages is 0"),
        (lambda: pipeline.idle_share(4, 0), "microbatches is 0"),
        (lambda: pipeline.overhead(4, 4, 0), "chunks is 0"),
        (lambda: pipeline.microbatches_needed(4, 1.0), "most_idle is 1.0"),
        (lambda: pipeline.in_flight_1f1b(4, 4, 8), "stage is 4; with 4 stages it lies in 0..3"),
        (lambda: pipeline.uneven_makespan([1, 2], [1], 4), "2 forward and 1 backward times"),
        (lambda: pipeline.uneven_makespan([], [], 4), "stages is 0"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, says):
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


def test_needs_no_torch():
    code = "import sys, minillm.predict.training.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
