"""Lab 16, what else becomes smaller: keys and values, weights left out, matrices of low rank."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab16_quantization.checks import expect_pair
from minillm.predict.serving import quantization as predict

ANSWERS = answers_of("16_quantization")
HALF = 0.5 + 1e-3  # of a step: half of one, and room for float32's rounding of 127.5 steps

# Keys and values.


@exercise(
    "int8-kv",
    minutes=10,
    difficulty=1,
    hints=(
        "How many scales does the exercise ask for? Then over which dimension is the largest |key| taken?",
        "scale = 2 · keys.abs().amax(-1) / 255, [tokens, heads]; codes = round(keys / scale[..., None]), cut to "
        "-128 .. 127, as int8.",
    ),
)
def check_kv(learner: Callable) -> Receipt:
    rows = []
    for tokens, heads, size in (
        (1, 1, 4),
        (3, 2, 8),
        (random.randint(4, 9), random.choice((3, 5)), random.choice((6, 14))),
    ):
        keys = torch.randn(tokens, heads, size) * torch.exp(2 * torch.randn(tokens, heads, 1))
        if tokens > 1:  # a row of zeros, and a tiny one, of which 101.47 steps would be 101.5 in float16
            keys[-1, -1] = 0
            keys[0, 0] = 1e-6 * torch.cat((torch.tensor((127.5, 101.47)), torch.randn(size - 2)))
        rows += _judge_kv(learner, keys, f"{tokens} tokens, {heads} heads of {size}")
    return receipt("keys in int8, a scale for each token and head", rows, open_rows=2)


def _judge_kv(learner: Callable, keys: Tensor, name: str) -> list:
    asked = "(codes, int8 [tokens, heads, head_dim]; scales, float32 [tokens, heads])"
    shapes = (keys.shape, torch.int8), (keys.shape[:2], torch.float32)
    codes, scale = expect_pair(learner(keys), asked, *shapes, who=f"{name}: you")
    right = 2 * keys.abs().amax(-1) / 255
    right = torch.where(right == 0, 1, right)
    if not torch.allclose(scale, right, rtol=1e-5, atol=0):
        where = tuple(int(i) for i in ((scale - right).abs() / right).nan_to_num(9e9).flatten().argmax().unsqueeze(0))
        token, head = divmod(where[0], keys.shape[1])
        said = f"{name}: your scale of token {token}, head {head} is {scale[token, head]:.6g}, and it is "
        raise CheckFailed(f"{said}{right[token, head]:.6g}.", evidence=scale)
    # ±m divided by the scale is ±127.5, and the order of operations decides to which side -127.5 goes: both are right.
    steps = keys.double() / right.double()[..., None]
    off = (steps - codes).abs()
    if not float(off.max()) <= HALF:
        place = int(off.flatten().argmax())
        token, head, number = place // keys[0].numel(), place % keys[0].numel() // keys.shape[2], place % keys.shape[2]
        said = f"{name}: number {number} of token {token}, head {head} is {steps[token, head, number]:.3f} scales and "
        said += f"has code {int(codes[token, head, number])}: more than half a step away."
        raise CheckFailed(said, evidence=codes)
    bits = 8 * (codes.nbytes + scale.nbytes) / keys.numel()
    return [
        row(f"{name}: bits per number", predict.cache_bits_per_number(8, keys.shape[2], scale_bits=32), bits, "", 1e-9),
        row("    largest error, in steps: at most 1/2", True, float(off.max()) <= HALF),
    ]


# Two of four.


@exercise(
    "two-of-four",
    minutes=10,
    difficulty=2,
    hints=(
        "Give every four inputs a dimension of their own. Which two are the largest, and in which order does the "
        "exercise want them?",
        "weight.unflatten(1, (-1, 4)).abs().topk(2).indices are ordered by size: sort them, then gather the weights "
        "(with their signs) at these places.",
    ),
)
def check_two_of_four(learner: Callable) -> Receipt:
    rows = []
    for outputs, inputs in ((3, 8), (1, 4), (random.randint(4, 9), 4 * random.randint(3, 9))):
        weight = torch.randn(outputs, inputs)
        rows += _judge_two_of_four(learner, weight, f"{outputs} x {inputs}")
    alike = torch.tensor([[1.0, -1, 1, 0, 0, 0, 0, -2], [0, 0, 2, 0, -0.5, 3, 0.5, 0]]) * random.uniform(0.5, 2)
    rows += _judge_two_of_four(learner, alike, "2 x 8, some |w| equal or 0")
    return receipt("two of four", rows, open_rows=2)


def _judge_two_of_four(learner: Callable, weight: Tensor, name: str) -> list:
    outputs, inputs = weight.shape
    asked = "(values [out, in / 2]; places, uint8 [out, in / 2])"
    shapes = ((outputs, inputs // 2), weight.dtype), ((outputs, inputs // 2), torch.uint8)
    values, places = expect_pair(learner(weight), asked, *shapes, who=f"{name}: you")
    if int(places.max()) > 3:
        raise CheckFailed(f"{name}: place {int(places.max())} takes more than two bits: count inside each four, 0 .. 3")
    fours, kept = weight.unflatten(1, (-1, 4)), places.unflatten(1, (-1, 2)).long()
    back = torch.zeros_like(fours).scatter_(2, kept, values.unflatten(1, (-1, 2)))
    for output in range(outputs):
        for number, four in enumerate(fours[output].tolist()):
            first, second = kept[output, number].tolist()
            largest = sorted(map(abs, four))[2:]
            if first >= second or sorted((abs(four[first]), abs(four[second]))) != largest:  # of equal ones any
                right = sorted(sorted(range(4), key=lambda place: -abs(four[place]))[:2])
                shown = ", ".join(f"{x:.2f}" for x in four)
                said = f"{name}: of ({shown}) you keep the places {[first, second]}, and it is {right}."
                raise CheckFailed(said, evidence=(values, places))
    if not torch.equal(values, fours.gather(2, kept).flatten(1)):
        raise CheckFailed(f"{name}: unpacked, your values are not the weights at these places.", evidence=values)
    bits = (16 * values.numel() + 2 * places.numel()) / weight.numel()
    share = float((back - fours).square().sum() / fours.square().sum())
    return [
        row(f"{name}: bits per weight, values in 16 bits", 9, bits),
        row("    share of Σ w² left out: less than half", True, share < 0.5),
    ]


# Low rank.


@exercise(
    "low-rank",
    minutes=15,
    difficulty=2,
    hints=(
        "The singular values alone say how large the error of each rank is. Which is the first that is good enough?",
        "‖W‖² = Σ σ². Rank r leaves out σ from number r on: take the smallest r with Σ of their squares <= error² · "
        "‖W‖². A = U[:, :r] · σ[:r], B = Vᵀ[:r].",
    ),
)
def check_low_rank(learner: Callable) -> Receipt:
    sizes = [(4, 3, 0.5), (6, 9, 0.2), (12, 12, 0.9), (10, 7, 0.1), (8, 11, 0.7)]
    sizes += [(random.randint(13, 20), random.randint(21, 30), random.uniform(0.05, 0.6)) for _ in range(3)]
    cases = []
    for number, (outputs, inputs, error) in enumerate(sizes):
        falling = torch.rand(inputs).double() ** (0, 1, 3)[number % 3]  # flat spectra and steep ones
        cases.append((torch.randn(outputs, inputs, dtype=torch.float64) * falling, error))
    alike = torch.eye(4, dtype=torch.float64)  # one value left out is 1/2 of ‖W‖: just good enough, or too much
    cases += [(alike, 0.5), (alike, random.uniform(0.1, 0.4))]
    rows, ranks, wrong = [], [], ""
    for weight, error in cases:
        outputs, inputs = weight.shape
        name = f"{outputs} x {inputs}, error {error:.2f}"
        left, right = _two_matrices(learner, weight, error, name)
        ranks.append(left.shape[1])
        values, whole = torch.linalg.svdvals(weight).tolist(), float(weight.norm())
        leaves = [predict.low_rank_error(values, rank) / whole for rank in range(len(values) + 1)]
        rank = next(r for r, each in enumerate(leaves) if each <= error)
        if ranks[-1] != rank:
            before = max(rank - 1, 0)
            said = f"{name}: your rank is {ranks[-1]}; {rank} is the smallest that is good enough: it leaves "
            wrong = wrong or f"{said}{leaves[rank]:.3f} of ‖W‖, and {before} leaves {leaves[before]:.3f}."
            continue
        measured = float((weight - left @ right).norm()) / whole
        if not abs(measured - leaves[rank]) <= 4e-6 and not wrong:  # float32 is exact enough
            said = (
                f"{name}: the error of A B is {measured:.4f}, and the singular values left out give {leaves[rank]:.4f}."
            )
            raise CheckFailed(said, evidence=left @ right)
        rows.append(row(f"{name}: rank {rank}, error", round(leaves[rank], 5), round(measured, 5), "", 1e-3))
        numbers = rank * (outputs + inputs)
        rows.append(row("    numbers in A and B / numbers in W", None, f"{numbers:,} / {weight.numel():,}"))
    if wrong:
        raise CheckFailed(wrong, evidence=ranks)
    return receipt("the smallest rank that is good enough", rows, open_rows=2)


def _two_matrices(learner: Callable, weight: Tensor, error: float, name: str) -> tuple[Tensor, Tensor]:
    found = learner(weight, error)
    fits = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(x, Tensor) for x in found)
    if not fits or any(x.dim() != 2 for x in found) or found[0].shape[1] != found[1].shape[0]:
        raise CheckFailed(f"{name}: the exercise asks for two matrices, A [out, r] and B [r, in]")
    left, right = found
    if (left.shape[0], right.shape[1]) != tuple(weight.shape):
        made = f"[{left.shape[0]}, {right.shape[1]}]"
        raise CheckFailed(f"{name}: A B is {made}, and the weight is {list(weight.shape)}: A is [out, r], B [r, in]")
    return left, right
