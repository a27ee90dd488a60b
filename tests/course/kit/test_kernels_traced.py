"""Kernels in Triton's interpreter, traced: bytes, what lies outside, races; and nothing is left changed."""

import pytest
import torch

from course.shared.kernels import INSTALLED, launch, left_out
from minillm.model.kernels import tl

pytestmark = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")


def add_one(x, y, n, BLOCK):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place, mask=place < n, other=0.0) + 1, mask=place < n)


def add_one_unmasked(x, y, n, BLOCK):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, tl.load(x + place) + 1)


def total(x, y, n, BLOCK):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y, tl.load(y) + tl.sum(tl.load(x + place, mask=place < n, other=0.0), 0))


def total_atomic(x, y, n, BLOCK):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y, tl.sum(tl.load(x + place, mask=place < n, other=0.0), 0))


def same_place(x, y, n, BLOCK):
    place = tl.arange(0, BLOCK)
    tl.store(y + place // 2, tl.load(x + place, mask=place < n, other=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_bytes_by_argument(n, dtype):
    x, y = torch.arange(n).to(dtype), torch.zeros(n, dtype=dtype)
    seen = launch(add_one, (-(-n // 16),), x, y, n, BLOCK=16)
    size = n * x.element_size()
    assert torch.equal(y, x + 1)
    assert (seen.loaded, seen.stored, seen.distinct) == ({"x": size}, {"y": size}, {"x": size, "y": size})
    assert (seen.outside, seen.races, seen.programs, seen.tile, seen.bytes) == ((), (), -(-n // 16), 16, 2 * size)


def test_what_lies_outside_is_named_not_a_number_and_left_alone():
    room = torch.zeros(64)
    x, y = torch.ones(20), room[:20]
    seen = launch(add_one_unmasked, (2,), x, y, 20, BLOCK=16)
    assert [each.partition(")")[2] for each in seen.outside] == [
        " loads x[20], and x has 20 numbers",
        " stores y[20], and y has 20 numbers",
    ]
    assert torch.equal(y, torch.full((20,), 2.0)) and not room[20:].any()


def test_what_a_mask_leaves_out_is_not_a_number_unless_the_load_says_what_it_is():
    def careless(x, y, n, BLOCK):
        place = tl.arange(0, BLOCK)
        tl.store(y, tl.sum(tl.load(x + place, mask=place < n), 0))

    for n, known in ((3, False), (4, True)):
        y = torch.zeros(1)
        launch(careless, (1,), torch.ones(n), y, n, BLOCK=4)
        assert (float(y) == 4) is known and bool(y.isnan()) is not known


def test_the_gap_between_rows_is_outside():
    x = torch.ones(2, 10)[:, :8]
    seen = launch(add_one_unmasked, (1,), x, torch.zeros(16), 16, BLOCK=16)
    assert len(seen.outside) == 1 and "loads x[8]" in seen.outside[0]


def test_a_race_has_right_values_here_and_is_found_and_an_atomic_operation_is_none():
    x = torch.arange(40.0)
    sums = torch.zeros(2, 1)
    racing = launch(total, (3,), x, sums[0], 40, BLOCK=16)
    atomic = launch(total_atomic, (3,), x, sums[1], 40, BLOCK=16)
    assert sums.tolist() == [[780.0], [780.0]]
    assert any("both store to y[0]" in race for race in racing.races)
    assert any("loads from y what program" in race for race in racing.races) and atomic.races == ()
    lanes = launch(same_place, (1,), x, torch.zeros(8), 40, BLOCK=16)
    assert lanes.races == ("program 0 stores several numbers of one tile to one place of y",)


def test_wrong_arguments_and_errors_are_one_sentence():
    with pytest.raises(ValueError, match=r"takes \(x, y, n, BLOCK\) and is launched with \(x, y\)"):
        launch(add_one, (1,), torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="Error"):
        launch(add_one, (1,), torch.ones(3), torch.ones(3), 3, BLOCK=12)  # no power of two


def test_triton_is_as_it_was():
    kept = {home: dict(vars(home)) for home in (tl, tl.core, tl.tensor, tl.math)}
    zeros = tl.standard.zeros
    launch(total, (1,), torch.ones(3), torch.zeros(1), 3, BLOCK=4)
    assert tl.standard.zeros is zeros
    for home, names in kept.items():
        assert all(vars(home)[name] is value for name, value in names.items())


def test_left_out_says_what_is_missing(capsys):
    assert left_out() is None and left_out(2) == (None, None)
    assert "pip install triton" in capsys.readouterr().out
