"""Lab 17, many adapters: one batch for all of them, and keys of cached blocks that tell them apart."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.shared.diagnose import expect_tensor
from course.shared.measuring import count_flops

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum")


class Products(TorchDispatchMode):
    """Counts the matrix products that torch is asked for inside the block. of_vectors: FLOPs of those of a matrix and a
    vector, which torch's own counter leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.of_vectors = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in PRODUCTS
        if name in ("mv", "addmv", "dot"):
            self.of_vectors += 2 * max(each.numel() for each in args if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))


def count_products(work: Callable[[], Any]) -> int:
    with Products() as counter:
        work()
    return counter.count


# One batch.


@exercise(
    "grouped-adapters",
    minutes=20,
    difficulty=3,
    hints=(
        "The base does not care whose token it is. Sort the tokens by adapter: which rows does each adapter need?",
        "y = x @ weight.T. For every number in which.unique() that is not -1: rows = (which == number).nonzero()[:, 0] "
        "and y[rows] += scale · (x[rows] @ A.T) @ B.T. With argsort the rows of an adapter lie side by side.",
    ),
)
def check_grouped(learner: Callable) -> Receipt:
    rows = []
    for which, ranks in _batches():
        inputs, outputs = random.sample(range(24, 48), 2)
        x, weight = torch.randn(len(which), inputs), torch.randn(outputs, inputs)
        adapters = [
            (torch.randn(r, inputs), torch.randn(outputs, r), random.choice((0.5, 2.0)) / r**0.5) for r in ranks
        ]
        which = torch.tensor(which)
        used = sorted({int(n) for n in which if n >= 0})
        name = f"{len(which)} tokens, {len(used)} of {len(ranks)} adapters"
        y = learner(x, weight, adapters, which)
        expect_tensor(f"{name}: the output", y, (len(which), outputs))
        _judge_rows(y, _one_by_one(x, weight, adapters, which), x @ weight.T, which, name)
        work = 2 * len(which) * inputs * outputs
        work += sum(2 * int((which == n).sum()) * ranks[n] * (inputs + outputs) for n in used)
        flops = count_flops(lambda: learner(x, weight, adapters, which))  # noqa: B023
        with Products() as counter:
            learner(x, weight, adapters, which)
        flops, products = flops + counter.of_vectors, counter.count
        if products > 1 + 2 * len(used):
            raise CheckFailed(
                f"{name}: right values, in {products} matrix products: the base needs 1 for all tokens, and each "
                f"adapter that is in the batch 2: {1 + 2 * len(used)}",
                rows,
            )
        if flops > work:
            raise CheckFailed(
                f"{name}: right values, for {flops:,} FLOPs instead of {work:,}: does an adapter compute tokens that "
                "are not its own, in a rank that it does not have?",
                rows,
            )
        if 1 in ranks:
            continue  # einsum multiplies by a rank of 1 without a matrix product, so fewer are counted
        if flops < work:
            raise CheckFailed(
                f"{name}: right values, but matrix products have {flops:,} FLOPs instead of {work:,}: is something "
                "multiplied number by number, or outside torch? Use x @ weight.T, and (rows @ A.T) @ B.T",
                rows,
            )
        rows.append(row(f"{name}: matrix products, 1 + 2 for each adapter that is there", 1 + 2 * len(used), products))
        rows.append(row("    FLOPs", work, flops))
    return receipt("many adapters in one batch", rows, open_rows=1, show="[2-9] of")


def _batches() -> Iterator[tuple[list[int], list[int]]]:
    """(which, ranks): no adapter at all, one for all tokens, some of several, in any order."""
    yield [-1, -1, -1], [2]
    yield [0, 0, 0, 0], [1]
    yield [1, -1, 0, 1, -1, 0, 1], [2, 5]
    count = random.randint(4, 6)
    ranks = random.sample((2, 3, 4, 6, 8, 16), count)
    absent = random.randrange(count)
    present = [n for n in range(count) if n != absent]
    which = [*present, -1, *random.choices([*present, -1], k=random.randint(8, 14))]
    random.shuffle(which)
    yield which, ranks


def _one_by_one(x: Tensor, weight: Tensor, adapters: list, which: Tensor) -> Tensor:
    rows = []
    for row_, number in zip(x.double(), which.tolist(), strict=True):
        y = weight.double() @ row_
        if number >= 0:
            a, b, scale = adapters[number]
            y = y + scale * (b.double() @ (a.double() @ row_))
        rows.append(y)
    return torch.stack(rows)


def _judge_rows(found: Tensor, right: Tensor, base: Tensor, which: Tensor, name: str) -> None:
    off = ~((found.double() - right).norm(dim=1) <= 1e-4 * right.norm(dim=1))  # NaN, too
    if not off.any():
        return
    token = int(off.nonzero()[0, 0])
    theirs = found[token].double()
    others = [n for n in range(len(right)) if n != token and torch.allclose(theirs, right[n], rtol=1e-3, atol=1e-3)]
    if others:
        said = f"it is that of token {others[0]}: sorted rows have to go back to where they came from"
    elif which[token] >= 0 and torch.allclose(found[token], base[token], rtol=1e-3, atol=1e-3):
        said = f"it is the base's, without adapter {int(which[token])}"
    elif which[token] < 0:
        said = "it has number -1, no adapter, and something was added to the base's output"
    else:
        said = f"it is not that of the base with adapter {int(which[token])}"
    raise CheckFailed(f"{name}: the output of token {token} is wrong: {said}", evidence=found)


# Keys.


@exercise(
    "adapter-key",
    minutes=15,
    difficulty=3,
    hints=(
        "A customer uploads a better adapter under the old name. What may the cache still hand out? And what if two "
        "names have the same weights?",
        "hashlib.sha256 over the scale and, in the order of sorted names, each layer's name, both matrices' shapes and "
        'dtypes, and their bytes: matrix.contiguous().view(torch.uint8).numpy().tobytes(). No adapter: b"".',
    ),
)
def check_key(learner: Callable) -> Receipt:
    pairs = 0
    for one, other, same, why in _pairs():
        keys = [learner(each) for each in (one, other)]
        for key, adapter in zip(keys, (one, other), strict=True):
            if not isinstance(key, bytes):
                raise CheckFailed(f"your key is {key!r:.60}; the exercise asks for bytes")
            if adapter is None and key != b"":
                raise CheckFailed(f'without an adapter the key is {key!r:.40}; the exercise asks for b""', evidence=key)
            if adapter is not None and len(key) < 8:
                raise CheckFailed(f"your key has {8 * len(key)} bits; use a hash of 64 bits at least")
        if (keys[0] == keys[1]) != same:
            have = "have one key" if keys[0] == keys[1] else "have different keys"
            raise CheckFailed(f"two adapters {have}: {why}", evidence=(pairs, keys[0] == keys[1]))
        pairs += 1
    adapter = _adapter()
    before = learner(adapter)
    adapter[1]["0.q_proj"][0].add_(1)
    if learner(adapter) == before:
        raise CheckFailed("an adapter was changed in place, and has the key of before: hash its values at each call")
    sizes = Counter(len(learner(_adapter())) for _ in range(3))
    return receipt(
        "keys of adapters",
        [
            row("pairs told apart, or not, as they should be", pairs, pairs),
            row("bits of a key: 64 or more", True, 8 * min(sizes) >= 64),
        ],
    )


def _adapter(rank: int = 2, size: int = 4) -> tuple:
    return 2.0, {name: (torch.randn(rank, size), torch.randn(size, rank)) for name in ("0.q_proj", "1.q_proj")}


def _pairs() -> Iterator[tuple[Any, Any, bool, str]]:
    """(adapter, adapter, whether they share, the lesson)."""
    rank, size = random.randint(2, 5), random.randint(6, 20)
    scale, layers = adapter = _adapter(rank, size)
    names = list(layers)
    copied = {name: (a.clone(), b.clone()) for name, (a, b) in layers.items()}
    yield (
        adapter,
        (scale, copied),
        True,
        "all their numbers are equal, so their blocks may be shared, whoever owns them",
    )
    yield adapter, (scale, dict(reversed(copied.items()))), True, "the order in which layers are listed changes nothing"
    strided = {name: (a.T.contiguous().T, b) for name, (a, b) in copied.items()}
    yield adapter, (scale, strided), True, "a tensor's values count, and not how they lie in memory"
    yield adapter, None, False, "the base alone has other keys and values"
    yield adapter, _adapter(rank, size), False, "the same layers with other numbers: a new version under an old name"
    for other in (scale / 2, scale * (1 + 1e-12)):
        yield adapter, (other, copied), False, f"the scale changes the update as much as the numbers do: {other!r}"
    for name in names:
        for which in (0, 1):
            place = random.randrange(rank * size)
            changed = [each.clone() for each in copied[name]]
            changed[which].view(-1)[place] += 1e-6 * (1 + changed[which].view(-1)[place].abs())
            other = copied | {name: tuple(changed)}
            yield adapter, (scale, other), False, f"{'AB'[which]} of {name} differs in one number: hash every one"
    swapped = {names[0]: copied[names[1]], names[1]: copied[names[0]]}
    yield adapter, (scale, swapped), False, "the same matrices at other layers: the names of layers belong in the key"
    for name in ("0.v_proj", "1.q_proj"):
        at_layers = [(scale, {each: layers[names[0]]}) for each in ("0.q_proj", name)]
        yield *at_layers, False, f"the same matrices at 0.q_proj and at {name}: whole names of layers belong in the key"
    fewer = {names[0]: copied[names[0]]}
    yield adapter, (scale, fewer), False, "one of the layers is missing"
    numbers = torch.randn(8)
    shapes = [(scale, {"0.q_proj": (numbers.view(r, -1), numbers.view(-1, r))}) for r in (2, 4)]
    yield *shapes, False, "the same bytes in another shape are another rank: hash shapes, too"
    bits = torch.randint(0, 2**14, (2, 4), dtype=torch.int16)
    one, other = ((bits.view(dtype), bits.T.contiguous().view(dtype)) for dtype in (torch.float16, torch.bfloat16))
    for pair, which in (((other[0], one[1]), "A"), ((one[0], other[1]), "B")):
        kinds = [(scale, {"0.q_proj": each}) for each in (one, pair)]
        yield *kinds, False, f"the same bytes of {which} in another dtype are other numbers: hash dtypes, too"
    yield from _pairs_of_a_layer(scale)


def _pairs_of_a_layer(scale: float) -> Iterator[tuple[Any, Any, bool, str]]:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    pairs = (
        ((a, b), (torch.cat([a, b])[:3], b), True, "a tensor's values count, and not what else is in its storage"),
        ((a, b), (b, a), False, "A and B are exchanged"),
        ((a, b), (2 * a, b / 2), False, "B A is equal, A and B are not: hash both matrices and not their product"),
        ((a.double(), b), (a.double() + 1e-12, b), False, "numbers of float64 differ: hash values in their own dtype"),
        ((-torch.ones(3, 3), b), (-2 * torch.ones(3, 3), b), False, "A is -1 and -2: Python's hash() of both is -2"),
    )
    for one, other, same, why in pairs:
        yield (scale, {"0.q_proj": one}), (scale, {"0.q_proj": other}), same, why
