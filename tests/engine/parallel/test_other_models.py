"""DDP, ZeRO and FullyShard on other people's modules, against torch's DistributedDataParallel."""

import model_programs as programs
import pytest
import torch

from minillm.comm import launch

pytestmark = pytest.mark.drawn(2)

BLOCKS = {
    "llama": [f"model.layers.{n}" for n in range(3)],
    "transformer": [f"transformer.encoder.layers.{n}" for n in range(2)],
    "cnn": ["layers.0", "layers.1"],
    "odd": [],
}


@pytest.fixture(scope="module")
def ranks():
    return launch(programs.everything, 2, timeout=180)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("name", programs.MODELS)
def test_gradients_weights_and_buffers_are_those_of_torch(ranks, name, form):
    """With parameter groups and a schedule of the learning rate; ranks have different rows."""
    for rank in ranks:
        (wanted, end), (gradients, state) = rank[name]["torch"], rank[name][form]
        assert {key for key, gradient in gradients.items() if gradient.numel()} == {
            key for key, gradient in wanted.items() if gradient.numel()
        }
        for key in gradients:
            torch.testing.assert_close(gradients[key], wanted[key], rtol=1e-9, atol=1e-12, msg=key)
        assert state.keys() == end.keys()
        for key in end:
            if "running" not in key and "batches" not in key:  # those are a rank's own until the next forward pass
                torch.testing.assert_close(state[key], end[key], rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", programs.MODELS)
def test_blocks_are_found(ranks, name):
    assert ranks[0][name]["blocks"] == [*BLOCKS[name], "rest"]
