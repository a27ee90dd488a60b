"""What travels to ranks and back keeps the file and the line of its code, whatever cloudpickle makes of them."""

import traceback
from dataclasses import dataclass

import cloudpickle
import pytest

from minillm.comm import RankError, launch
from minillm.comm.launch.payload import to_bytes


def test_code_within_code_keeps_its_file():
    def outer():
        return lambda: [line for line in [1 / 0]]

    with pytest.raises(ZeroDivisionError) as caught:
        cloudpickle.loads(to_bytes(outer))()()
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert {frame.filename for frame in frames} == {__file__}
    assert frames[-1].line == "return lambda: [line for line in [1 / 0]]"


def test_a_rank_shows_the_line_at_which_it_failed():
    def fails(group):
        return {}["nothing"]  # here

    with pytest.raises(
        RankError, match=r'File ".*test_payload.py", line \d+, in fails\n    return {}\["nothing"\]  # here'
    ):
        launch(fails, 2)


def test_a_class_that_cannot_be_imported_comes_back():
    @dataclass
    class Measured:
        rank: int

        def fails(self):
            return self.rank / 0

    first, second = launch(lambda group: Measured(group.rank), 2)
    assert (first.rank, second.rank) == (0, 1)
    with pytest.raises(ZeroDivisionError) as caught:
        second.fails()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == __file__
