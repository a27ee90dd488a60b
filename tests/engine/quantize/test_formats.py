"""Formats against arithmetic written out here, torchao's and bitsandbytes' own (where they are installed)."""

from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.quantize.formats import (
    FLOAT8,
    NF4,
    NF4_LEVELS,
    DoubleScales,
    Float8,
    Int,
    pack_halves,
    unpack_halves,
)

EXACT = {"scale_dtype": torch.float32}
FORMATS = (
    Int(**EXACT),
    Int(bits=4, group=32, **EXACT),
    Int(bits=4, group=64, symmetric=False, **EXACT),
    Int(bits=8, group=16, symmetric=False, **EXACT),
    NF4(double=False),
    NF4(group=16, double=False),
    Float8(**EXACT),
    Float8(group=32, **EXACT),
)


def weights(outputs=24, inputs=128, seed=0):
    made = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    made[3] = 0.0  # a group of zeros
    made[4, 7] = 3.0  # an outlier
    made[5] = made[5].abs() + 0.1  # zero lies outside the group
    return made


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_weight_is_the_nearest_value_of_its_grid(format):
    weight = weights()
    found, grid = format.nearest(weight, format.grid(weight)), format.grid(weight)
    size = format.group or weight.shape[1]
    for output, start in ((0, 0), (3, 0), (4, 0), (5, 128 - size), (7, 128 - size)):
        own = grid.scale[output, start // size], None if grid.zero is None else grid.zero[output, start // size]
        values = torch.tensor(values_of(format, *own), dtype=torch.float64)
        for place in range(start, start + size):
            nearest = (values - weight[output, place].double()).abs().min()
            assert (found[output, place] - weight[output, place]).abs().double() <= nearest * (1 + 1e-5) + 3e-7


def values_of(format, scale, zero):
    """All values that a group can hold, from the definition of the format."""
    if isinstance(format, Int):
        steps = range(-(2 ** (format.bits - 1)), 2 ** (format.bits - 1))
        return [(step - (0 if zero is None else float(zero))) * float(scale) for step in steps]
    if isinstance(format, NF4):
        return [level * float(scale) for level in NF4_LEVELS]
    return [sign * value * float(scale) for sign in (-1, 1) for value in e4m3()]


def e4m3():
    """Numbers of at least 0: exponent 1 .. 15, bias 7, 3 bits of mantissa; subnormals; the last is no number."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (e - 7) for e in range(1, 16) for mantissa in range(8)]
    return (subnormal + normal)[:-1]


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution():
    """Dettmers et al. 2023, §3: 8 positive and 7 negative quantiles and 0, divided by the largest."""
    offset = 0.9677083
    quantile = NormalDist().inv_cdf
    positive = [quantile(offset + (0.5 - offset) * step / 8) for step in range(8)]
    negative = [-quantile(offset + (0.5 - offset) * step / 7) for step in range(7)]
    expected = torch.tensor(sorted([*positive, 0.0, *negative])) / max(positive)
    assert torch.allclose(torch.tensor(NF4_LEVELS), expected, atol=1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_group_of_zeros_and_the_largest_weight_come_back(format):
    weight = weights()
    back = format.nearest(weight, format.grid(weight))
    assert torch.equal(back[3], weight[3]) and back.isfinite().all()
    step = format.grid(weight).scale.max()
    assert (back - weight).abs().max() <= step * (16 if isinstance(format, Float8) else 0.5001)


@given(st.lists(st.integers(0, 15), min_size=2, max_size=40).filter(lambda codes: len(codes) % 2 == 0))
def test_halves_of_bytes_come_back_and_the_first_is_the_low_half(codes):
    packed = pack_halves(torch.tensor([codes]))
    assert packed.tolist()[0] == [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert unpack_halves(packed).tolist() == [codes]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_packing_keeps_every_code_and_takes_the_bytes_it_says(format):
    weight = weights()
    codes = format.encode(weight, format.grid(weight).spread(128))
    stored = format.pack(codes)
    assert torch.equal(format.unpack(stored), codes) and stored.nbytes == weight.numel() * format.bits // 8


def test_double_quantization_takes_4127_thousandths_of_a_bit_and_changes_scales_little():
    scale = torch.rand(256, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    doubled = DoubleScales.of(scale)
    bits = 4 + 8 * (doubled.codes.nbytes + doubled.largest.nbytes) / (scale.numel() * 64)
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256))  # Dettmers et al. 2023: 0.127 bits in place of 0.5
    largest = (scale - scale.mean()).view(-1, 256).abs().amax(1).repeat_interleave(256).view_as(scale)
    assert ((doubled.scale() - scale).abs() <= largest / 16 + 1e-6).all()  # 3 bits of mantissa round by 1/16 at most
    assert DoubleScales.of(scale[:3, :5]).scale().shape == (3, 5)


def test_codes_are_chosen_for_the_scale_that_is_kept():
    weight = weights()
    format = Int(bits=4, group=32)  # scales in bfloat16
    grid = format.grid(weight)
    assert torch.equal(grid.scale, grid.scale.bfloat16().float())
    wide = grid.spread(128)
    inside = (weight / wide.scale).abs() <= 7.5
    assert ((format.nearest(weight, grid) - weight).abs() <= wide.scale * 0.5001)[inside].all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32), (4, 128)])
def test_integers_equal_those_of_torchao(bits, group, symmetric):
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    weight = weights(inputs=256)
    kind = primitives.MappingType.SYMMETRIC if symmetric else primitives.MappingType.ASYMMETRIC
    block, limits = (1, group or 256), (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    scale, zero = primitives.choose_qparams_affine(weight, kind, block, torch.int8, *limits)
    theirs = primitives.quantize_affine(weight, block, scale, zero, torch.int8, *limits)
    format = Int(bits=bits, group=group, symmetric=symmetric, **EXACT)
    grid = format.grid(weight)
    zeros = weight.view(24, -1, group or 256).abs().amax(-1) == 0  # where any scale will do
    assert torch.equal(grid.scale[~zeros], scale.view_as(grid.scale)[~zeros])
    assert symmetric or torch.equal(grid.zero[~zeros], zero.view_as(grid.zero)[~zeros].float())
    codes = format.encode(weight, grid.spread(256))
    apart = (codes.int() - theirs.int()).abs()
    halves = weight / grid.spread(256).scale
    tie = (halves - halves.floor() - 0.5).abs() < 1e-4  # they multiply by 1 / scale
    assert (apart[~tie & ~zeros.repeat_interleave(group or 256, 1)] == 0).all() and apart[tie].sum() <= tie.sum()


def test_nf4_equals_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weights(inputs=256)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    format = NF4(double=False)
    grid = format.grid(weight)
    assert torch.equal(torch.tensor(NF4_LEVELS), state.code.cpu())
    filled = grid.scale.flatten() != 1
    assert torch.equal(grid.scale.flatten()[filled], state.absmax[filled])
    theirs = unpack_halves(packed.flatten())  # they put the first code into the high half
    theirs = theirs.view(-1, 2).flip(1).view(24, 256)
    assert torch.equal(format.encode(weight, grid.spread(256)), theirs)
    assert torch.equal(format.nearest(weight, grid), functional.dequantize_4bit(packed, state))


def test_float8_equals_a_cast_of_the_scaled_weight():
    weight = weights()
    format = Float8(**EXACT)
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = format.encode(weight, format.grid(weight).spread(128))
    kept = scale[:, 0] > 0
    assert torch.equal(codes.view(FLOAT8).float()[kept], (weight / scale).to(FLOAT8).float()[kept])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int(bits=3), "bits 3 is not supported: integers have 4 or 8"),
        (lambda: Int(group=0), "group 0 must be a whole number of at least 1"),
        (lambda: Int(bits=4, group=96).check_size(256, "q_proj"), "group 96 does not divide the 256 inputs of q_proj"),
        (lambda: NF4(group=None).check_size(129, "q_proj"), "129 inputs, and two codes of 4 bits share a byte"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
