"""The models that `train` knows by name: their sizes, and that some are large enough for GPUs."""

import pytest

from minillm.predict.model import parameters
from minillm.train.presets import SIZES, preset


@pytest.mark.parametrize(
    ("size", "millions"),
    [("tiny", 0.16), ("draft", 0.56), ("target", 5.8), ("medium", 27), ("large", 310), ("1b", 980)],
)
def test_parameters_are_as_said(size, millions):
    assert parameters(preset(size, 4096, 256)).total / 1e6 == pytest.approx(millions, rel=0.03)


def test_the_largest_has_the_blocks_of_a_model_that_people_train():
    """Llama 3.2 1B: https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json."""
    largest = preset(SIZES[-1], 4096, 2048)
    assert (largest.hidden_size, largest.intermediate_size, largest.num_layers) == (2048, 8192, 16)
    assert (largest.num_heads, largest.num_kv_heads, largest.head_dim) == (32, 8, 64)
