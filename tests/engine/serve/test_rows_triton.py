"""The sampler's kernel, run in the interpreter."""

from pathlib import Path

import pytest

from tests.engine.triton_interpreter import check_in_the_interpreter, needs_triton


@pytest.mark.full
@needs_triton
def test_tokens_are_those_of_the_reference():
    check_in_the_interpreter(Path(__file__).with_name("interpreted_rows.py"))
