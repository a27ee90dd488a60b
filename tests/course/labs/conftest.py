"""Figures are looked at as a page shows them."""

import pytest

from minillm.drawing import style


@pytest.fixture(autouse=True)
def as_shown():
    with style():
        yield
