"""The pipeline runtime against one process in double precision, against its schedule, and against its receipts."""

import pipeline_programs as programs
import pytest

from minillm.comm import launch
from minillm.predict import pipeline as predict


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_schedule_gives_the_gradients_of_one_process(stages):
    ranks = launch(programs.run_all, stages)
    for row in zip(*ranks, strict=True):
        name, microbatches, tied, parts = row[0]["case"]
        case = row[0]["case"]
        assert max(rank["error"] for rank in row) <= 1e-10, case
        assert max(rank["loss"] for rank in row) <= 1e-10, case
