"""Figures are drawn here as where they are shown or written: in the course's style."""

import pytest

from minillm.drawing import style


@pytest.fixture(autouse=True)
def _in_style():
    with style():
        yield
