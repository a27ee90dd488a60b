"""What ends every torchrun script: each part judged for all ranks, unwritten ones named, and an exit status."""

import pytest

from course.kit.receipts import row
from course.kit.torchrun import attempt, run


def unwritten(group):
    raise NotImplementedError


def program(group):
    return attempt({"rank": lambda group: group.rank, "rest": unwritten}, group)


@pytest.mark.parametrize(("expected", "status"), [([0, 1, 2, 3], 0), ([0, 1, 2], 1)])
def test_each_part_is_judged_over_all_ranks(expected, status, capsys):
    with pytest.raises(SystemExit) as stop:
        run("lab 90", program, lambda name, ranks: [row(name, expected, ranks)])
    assert stop.value.code == status
    title, _, judged, left = capsys.readouterr().out.splitlines()
    assert title == "lab 90 on 4 ranks" and judged.endswith("off" if status else "ok")
    assert left.startswith("rest: not written yet")
