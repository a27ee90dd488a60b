"""Every claim of every lab's receipts holds on this machine: what the tour prints is asserted here."""

import pytest

from minillm.cli.tour import tour
from minillm.labkit import course

pytestmark = [pytest.mark.slow, pytest.mark.wire]
CLAIMS = [(lab, claim) for lab in course.numbers("receipts") for claim in course.load("receipts", lab).CLAIMS]


@pytest.mark.parametrize(("lab", "claim"), CLAIMS, ids=lambda value: getattr(value, "__name__", value))
def test_claim_holds(lab, claim):
    found = list(getattr(claim(), "rows", None) or claim())
    off = [row for row in found if row.verdict == "off" and not row.noisy]
    assert found and not off, f"lab {lab}: {off}"


def test_the_tour_walks_all_of_them():
    assert [lab for lab, _ in tour(["11"])] == ["11"] * len(course.load("receipts", "11").CLAIMS)
