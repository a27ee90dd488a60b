"""The rotation and the gate as Triton kernels, run in the interpreter."""

from pathlib import Path

import pytest

from tests.engine.triton_interpreter import check_in_the_interpreter, needs_triton


@pytest.mark.full
@needs_triton
def test_kernels_equal_torch_and_a_layer_has_few_launches():
    check_in_the_interpreter(Path(__file__).with_name("interpreted_elementwise.py"))
