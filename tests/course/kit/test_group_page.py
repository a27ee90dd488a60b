"""The page about Group says what Group does: it is generated, and its shapes are true."""

from pathlib import Path

import torch

from course.kit.api import SHOWN, group_page
from minillm.comm import launch


def test_the_committed_page_is_the_generated_one():
    page = Path(__file__).parents[3] / "docs" / "group.md"
    assert page.read_text(encoding="utf-8") == group_page(), "write it anew: python -m minillm notebooks"


def test_every_lab_links_the_page_or_needs_no_group():
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert "docs/group.md" in readme
    assert all(f"group.{name}(" in group_page() for _, names in SHOWN for name in names)


def calls(group):
    n, x = group.world_size, torch.arange(6.0).view(6, 1)
    work = group.all_reduce(x.clone(), async_op=True)
    y, half = x.clone(), group.subgroup(range(2), "half")
    return {
        "all_gather": tuple(group.all_gather(x).shape) == (6 * n, 1),
        "reduce_scatter": tuple(group.reduce_scatter(x).shape) == (6 // n, 1),
        "all_to_all": tuple(group.all_to_all(x).shape) == (6, 1),
        "all_reduce": group.all_reduce(y) is y,
        "broadcast": group.broadcast(y) is y,
        "work": torch.equal(work.wait(), n * x),
        "objects": group.gather_objects(group.rank) == list(range(n)),
        "outside": half.rank == (group.rank if group.rank < 2 else -1),
    }


def test_what_the_page_says_of_results_is_so():
    for rank in launch(calls, 3):
        assert all(rank.values()), rank
