"""Lab 16, formats: weights in groups of four bits, and levels that a normal distribution fills equally.

    checks_methods.py    AWQ's search and GPTQ's columns
    checks_smaller.py    keys and values in int8, 2:4, low rank
    checks_breaks.py     which program has which bug

Answers are compared with minillm's own formats (`minillm.quantize`), which tests hold to other projects', and with the
formulas of `predict.serving.quantization`.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect
from minillm.predict.serving import quantization as predict
from minillm.quantize import NF4, Int
from minillm.quantize.formats import NF4_LEVELS

ANSWERS = answers_of("16_quantization")


def expect_pair(found: Any, asked: str, first: tuple, second: tuple, who: str = "you") -> tuple[Tensor, Tensor]:
    """The two tensors that an answer returned. first, second: (shape, dtype) of each; dtype None = any."""
    kinds = (first, second)
    fits = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(each, Tensor) for each in found)
    expect(fits, found, asked, who)
    for each, (shape, dtype) in zip(found, kinds, strict=True):
        right = tuple(each.shape) == tuple(shape) and dtype in (None, each.dtype)
        if not right:
            got = f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}"
            raise CheckFailed(f"{who} returned a tensor {got}; the exercise asks for {asked}, here {list(shape)}")
    return found[0], found[1]


def two_functions(learner: Any, names: str) -> tuple[Callable, Callable]:
    """The two functions that an exercise asks for."""
    if not (isinstance(learner, tuple) and len(learner) == 2 and all(map(callable, learner))):
        raise CheckFailed(f"the exercise asks for two functions: ({names})")
    return learner


# Groups of four bits.


@exercise(
    "int4-groups",
    minutes=20,
    difficulty=2,
    hints=(
        "Give the groups a dimension of their own: weight.unflatten(1, (-1, group)). Which of your numbers belong to a "
        "group, and which to a weight?",
        "scale = 2 · max|w| / 15 in bfloat16, codes = round(w / scale) cut to -8 .. 7, plus 8. Even places of a row "
        "are the low halves: low | high << 4. Back: & 15 and >> 4 give them again, in turn.",
    ),
)
def check_int4(learner: Any) -> Receipt:
    quantize, dequantize = two_functions(learner, "quantize_int4, dequantize_int4")
    rows = []
    for outputs, inputs, group in ((1, 4, 4), (3, 16, 8), (random.randint(5, 9), 16 * random.randint(5, 7), 16)):
        weight = _weights_for_int4(outputs, inputs, group)
        name = f"{outputs} x {inputs}, groups of {group}"
        rows += _judge_int4(quantize, dequantize, weight, group, name)
    return receipt("int4 in groups, two codes to a byte", rows, open_rows=2)


def _weights_for_int4(outputs: int, inputs: int, group: int) -> Tensor:
    """The last output begins with a group of zeros, the first ends with one of tiny weights. No weight lies halfway
    between two codes, where rounding in another order would choose the other one."""
    while True:
        weight = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
        weight[0, -group:] *= 1e-6
        weight[-1, :group] = 0
        steps = weight / Int(bits=4, group=group).grid(weight).spread(inputs).scale
        if float((steps.abs() % 1 - 0.5).abs().min()) > 1e-5:
            return weight


def _judge_int4(quantize: Callable, dequantize: Callable, weight: Tensor, group: int, name: str) -> list:
    format = Int(bits=4, group=group)
    grid = format.grid(weight)
    wide = grid.spread(weight.shape[1])
    codes = format.encode(weight, wide)
    asked = "(bytes, uint8 [out, in / 2]; scales, bfloat16 [out, in / group])"
    outputs, inputs = weight.shape
    shapes = ((outputs, inputs // 2), torch.uint8), ((outputs, inputs // group), torch.bfloat16)
    packed, scale = expect_pair(quantize(weight, group), asked, *shapes, who=f"{name}: quantize_int4")
    if not torch.equal(scale.float(), grid.scale):
        raise CheckFailed(f"{name}: {_wrong_scale(scale.float(), weight, group, grid.scale)}", evidence=scale)
    if not torch.equal(packed, format.pack(codes)):
        theirs, ours = packed.flatten().tolist(), format.pack(codes).flatten().tolist()
        place = next(i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
        row_, byte = divmod(place, inputs // 2)
        pair = codes[row_, 2 * byte : 2 * byte + 2].tolist()
        said = f"{name}: byte {byte} of output {row_} is {theirs[place]:08b} in binary; codes {pair} make it "
        raise CheckFailed(f"{said}{ours[place]:08b}.", evidence=packed)
    back = dequantize(packed, scale)
    fits = isinstance(back, Tensor) and back.shape == weight.shape and back.dtype == torch.float32
    expect(fits, back, f"weights, float32 {list(weight.shape)}", f"{name}: dequantize_int4")
    right = format.decode(codes, wide)
    if not torch.equal(back, right):
        row_, place = divmod(int((back != right).flatten().float().argmax()), inputs)
        said = f"{name}: weight {place} of output {row_} comes back as {back[row_, place]:.4f}, "
        raise CheckFailed(f"{said}and its code stands for {right[row_, place]:.4f}.", evidence=back)
    bits = 8 * (packed.nbytes + scale.nbytes) / weight.numel()
    worst = float(((back - weight).abs() / wide.scale).max())
    return [
        row(f"{name}: bits per weight", predict.bits_per_weight(4, group), bits),
        row("    largest error, in steps: at most 1/2 (and the scale's rounding)", True, worst <= 0.55),
    ]


def _wrong_scale(found: Tensor, weight: Tensor, group: int, right: Tensor) -> str:
    """Which scale is wrong, that of the first such group."""
    output, place = (int(i) for i in (found != right).nonzero()[0])
    who, is_ = f"group {place} of output {output}", f"{found[output, place]:.5g}"
    largest = float(weight[output, place * group : (place + 1) * group].abs().max())
    if largest == 0:
        return f"{who} is all zeros: a group of zeros has the scale 1, and yours is {is_}."
    told = f"2 · max|w| / 15 of it, with max|w| = {largest:.5g}, is {right[output, place]:.5g} in bfloat16"
    return f"your scale of {who} is {is_}; {told}."


def _show(values: Tensor) -> str:
    shown = ", ".join(f"{x:.4f}" for x in values.flatten()[:4].tolist())
    return f"({shown}{', ...' if values.numel() > 4 else ''})"


# Levels of a normal distribution.


@exercise(
    "nf4",
    minutes=20,
    difficulty=2,
    hints=(
        "How many values of p does each side need, so that 8 + 7 + 1 levels come out? Print p before you hand it to "
        "the quantile function.",
        "torch.linspace(0.9677083, 0.5, 9)[:-1] has 8 values. Nearest level: the distance of every weight to all 16, "
        "and argmin; or where it lies between the middles of neighbouring levels (torch.bucketize).",
    ),
)
def check_nf4(learner: Any) -> Receipt:
    levels_of, quantize = two_functions(learner, "nf4_levels, quantize_nf4")
    levels, published = levels_of(), torch.tensor(NF4_LEVELS)
    fits = isinstance(levels, Tensor) and levels.shape == (16,) and levels.dtype == torch.float32
    expect(fits, levels, "16 levels, float32", "nf4_levels")
    off = float((levels - published).abs().max())
    if not off <= 1e-6:  # NaN, too
        place = int((levels - published).abs().argmax())
        said = f"your levels are off by up to {off:.1e}: level {place} is {levels[place]:.6f}, and the paper's table "
        raise CheckFailed(f"{said}says {published[place]:.6f}.", evidence=levels)
    rows = [row("levels equal to the paper's table within 1e-6", True, off <= 1e-6)]
    for blocks, block in ((2, 8), (3, 16), (random.randint(4, 9), random.choice((24, 40, 64)))):
        weight = torch.randn(blocks, block) * torch.rand(blocks, 1)
        weight[0, 0] = -2 * weight[0].abs().max()
        weight[-1] = 0
        rows += _judge_nf4(quantize, weight.flatten(), block, f"{blocks} blocks of {block}")
    middles = (published[1:] + published[:-1]) / 2
    beside = torch.cat((torch.tensor([1.0]), middles - 5e-5, middles + 5e-5)) * random.uniform(0.5, 2)
    rows += _judge_nf4(quantize, beside, len(beside), "1 block of weights beside the middles between levels")
    return receipt("16 levels for normally distributed weights", rows, open_rows=2)


def _judge_nf4(quantize: Callable, weight: Tensor, block: int, name: str) -> list:
    asked = "(codes, uint8 [n]; largest, float32 [n / block])"
    shapes = ((len(weight),), torch.uint8), ((len(weight) // block,), torch.float32)
    codes, largest = expect_pair(quantize(weight, block), asked, *shapes, who=f"{name}: quantize_nf4")
    format = NF4(group=block, double=False)
    rows_ = weight.view(-1, block)
    right = rows_.abs().amax(1)
    if not torch.equal(largest, right):
        said = f"{name}: your largest |w| are {_show(largest)}, and it is {_show(right)}."
        raise CheckFailed(said, evidence=largest)
    expect(int(codes.max()) < 16, codes, "codes of 0 .. 15", name)
    back = torch.tensor(NF4_LEVELS)[codes.long()].view(-1, block) * largest[:, None]
    best = format.nearest(rows_, format.grid(rows_))
    worse = (back - rows_).abs() - (best - rows_).abs()
    if not float(worse.max()) <= 1e-6 * float(rows_.abs().max()):
        place = int(worse.flatten().argmax())
        said = (
            f"{name}: weight {place}, {weight[place]:.4f}, has code {int(codes[place])}, {back.flatten()[place]:.4f}; "
        )
        raise CheckFailed(f"{said}a nearer level stands for {best.flatten()[place]:.4f}.", evidence=codes)
    error = float((back - rows_).square().mean())
    return [row(f"{name}: mean square of the error", float((best - rows_).square().mean()), error, "", 1e-3)]
