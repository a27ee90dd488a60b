"""What a step holds on a GPU, counted on the CPU with the one kernel that differs there: torch's fused RMSNorm.

A build of torch for the CPU has no autograd for CUDA tensors, fake ones included.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm.bench.shapes import SHAPES as PUBLISHED
from minillm.model.transformer import RMSNorm
from minillm.predict.training.activations import block_activation_bytes
from minillm.predict.training.memory import training_step
from tests.engine.predict.test_memory_formulas import SHAPES, held_in_a_step, kept_by_a_block
from tests.engine.predict.test_model_formulas import configs


@torch.library.custom_op("predict::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.to(_wide(x)).square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight).to(x.dtype), scale


@torch.library.custom_op("predict::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    normalised, to_normalised = x * scale, gradient * weight
    to_x = scale * (to_normalised - normalised * (to_normalised * normalised).mean(-1, keepdim=True))
    return to_x.to(x.dtype), (gradient * normalised).flatten(0, -2).sum(0).to(weight.dtype)


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])


rms_norm.register_autograd(
    lambda ctx, gradient, _: (*torch.ops.predict.rms_norm_backward(gradient, *ctx.saved_tensors), None),
    setup_context=_save,
)


def fused(self: RMSNorm, x: Tensor) -> Tensor:
    """As on a GPU, where autocast raises what goes into it to float32."""
    x = x.to(_wide(x)) if torch.is_autocast_enabled("cpu") else x
    return torch.ops.predict.rms_norm(x, self.weight, self.eps)[0]


@pytest.fixture(scope="module", autouse=True)
def norms_of_a_gpu():
    with mock.patch.object(RMSNorm, "forward", fused):
        yield


@settings(max_examples=25)
@given(
    config=configs(others=({},)),
    batch=st.integers(1, 3),
    seq=st.integers(1, 8),
    stored=st.sampled_from([(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]),
)
def test_activation_bytes_of_a_block(config, batch, seq, stored):
    dtype, autocast = stored
    found = kept_by_a_block(config, batch, seq, dtype, autocast)
    sizes = dtype.itemsize, 2 if autocast else None
    assert found == block_activation_bytes(config, batch, seq, *sizes, fused_norms=True)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["bf16", "bf16-master", "bf16-pure"])
@pytest.mark.parametrize("batch, seq", [(4, 64), (1, 16), (8, 96)])
def test_a_whole_step(name, precision, batch, seq):
    found = held_in_a_step(SHAPES[name], precision, batch, seq)
    step = training_step(SHAPES[name], batch, seq, precision, device="cuda")
    assert step.most("activations") == pytest.approx(found.activation, abs=64)
    assert step.peak.total == pytest.approx(found.total, rel=0.02)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", ["bf16", "bf16-master"])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"activation_checkpointing": "full"}])
def test_accumulation_and_recomputation(precision, options):
    config = SHAPES["grouped, tied"]
    found = held_in_a_step(config, precision, 8, 96, **options)
    again = {"accumulate": options.get("accumulate", 1), "recompute": "activation_checkpointing" in options}
    step = training_step(config, 8, 96, precision, device="cuda", **again)
    assert (step.most("activations"), step.peak.total) == pytest.approx((found.activation, found.total), rel=0.02)


def test_a_billion_parameters():
    """Each of 33 norms of 4096 rows of 2048 keeps 32 MiB less."""
    shape = PUBLISHED["llama-1b"]
    on_cpu, on_gpu = (training_step(shape, 1, 4096, "bf16", device=device).peak.total for device in ("cpu", "cuda"))
    assert on_cpu - on_gpu == 33 * 32 * 2**20
    with pytest.raises(ValueError, match="known in 16 bits"):
        training_step(shape, 1, 4096, "fp32", device="cuda")
    with pytest.raises(ValueError, match="'mps'"):
        training_step(shape, 1, 4096, "bf16", device="mps")
