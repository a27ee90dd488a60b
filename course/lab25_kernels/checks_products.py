"""Lab 25, kernels of a decoding layer: a product in tiles, what lies between the products, a paged decode step."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt
from course.lab25_kernels.tried import DTYPES, Case, name_of, only_with_triton, shifted, two_kernels
from minillm.predict import kernels as predict


def check_matmul(learner: Callable) -> Receipt:
    rows = []
    shapes = ((16, 16, 16), (40, 100, 7), (random.randint(17, 40), random.randint(17, 40), random.randint(300, 500)))
    for place, (m, n, k) in enumerate(shapes):
        dtype = (torch.float32, torch.float16, torch.float16)[place]
        tile_m, tile_n, tile_k = random.choice(((16, 32, 16), (32, 16, 16), (16, 16, 32)))
        a = torch.randn(m, k).to(dtype) if place != 1 else torch.randn(k, m).to(dtype).T
        b = torch.randn(k, n).to(dtype) if place != 2 else torch.randn(n, k).to(dtype).T
        case = Case(f"{m} x {k} x {n}, tiles {tile_m} x {tile_n}, {name_of(dtype)}")
        c = torch.full((m, n), float("nan"), dtype=dtype)
        grid = -(-m // tile_m), -(-n // tile_n)
        given = learner, grid, a, b, c, m, n, k, *a.stride(), *b.stride()
        seen = case.launch(*given, M=tile_m, N=tile_n, K=tile_k)
        exact = a.double() @ b.double()
        case.compare("c", c, exact, *((1e-5, 1.0) if dtype is torch.float32 else (None, 0.2)))
        expected = predict.tiled_matmul(m, k, n, tile_m, tile_n, c.element_size())
        size = c.element_size()
        rows += case.bytes(seen, loaded={"a": m * k * grid[1] * size, "b": k * n * grid[0] * size},
                           stored={"c": m * n * size})  # fmt: skip
        if seen.bytes != expected.bytes:
            raise CheckFailed(f"{case.name}: {seen.bytes:,} B in all, and the formula says {expected.bytes:,.0f} B")
        case.tile(seen, max(tile_m * tile_k, tile_k * tile_n, tile_m * tile_n))
        if place == 1:
            case.shared_out(*given, tiles={"c": (tile_m, tile_n)}, M=tile_m, N=tile_n, K=tile_k)
    return receipt("a product in tiles", rows)


def check_between(learner: Any) -> Receipt:
    rotate, gate = two_kernels(learner, "rotate, gate")
    rows = []
    for place, (tokens, heads, half) in enumerate(
        ((1, 1, 1), (5, 3, 16), (4, random.randint(2, 5), random.choice((6, 12))))
    ):
        dtype = (torch.float32, torch.float16, random.choice(DTYPES))[place]
        x = shifted(torch.randn(tokens, heads * 2 * half), dtype, gap=place and random.randint(1, 20))
        angles = 6 * torch.rand(tokens, half)
        cos, sin = angles.cos(), angles.sin()
        case = Case(f"rotate: {tokens} tokens, {heads} heads of {2 * half}, {name_of(dtype)}")
        y = torch.full((tokens, heads, 2 * half), float("nan"), dtype=dtype)
        block = 1 << (half - 1).bit_length()
        given = rotate, (tokens, heads), x, cos, sin, y, x.stride(0), heads, half
        seen = case.launch(*given, BLOCK=block)
        exact = _rotated(x.double().view(tokens, heads, 2 * half), cos.double(), sin.double())
        case.compare("y", y, exact, scale=1.0 if dtype is torch.float32 else 0.01)
        size = x.numel() * x.element_size()
        rows += case.bytes(seen, loaded={"x": size}, stored={"y": size},
                           at_most={"cos": 4 * tokens * heads * half, "sin": 4 * tokens * heads * half})  # fmt: skip
        if place == 1:
            case.shared_out(*given, tiles={"y": (1, 1)}, BLOCK=block)
    for place, (count, width, block) in enumerate(((1, 1, 16), (7, 32, 16), (3, random.randint(33, 60), 16))):
        dtype = (torch.float32, torch.float16, random.choice(DTYPES))[place]
        both = (3 * torch.randn(count, 2 * width)).to(dtype)
        case = Case(f"gate: {count} rows of {width}, BLOCK {block}, {name_of(dtype)}")
        y = torch.full((count, width), float("nan"), dtype=dtype)
        given = gate, (count, -(-width // block)), both, y, width
        seen = case.launch(*given, BLOCK=block)
        wide = both.double()
        case.compare("y", y, torch.nn.functional.silu(wide[:, :width]) * wide[:, width:])
        rows += case.bytes(seen, loaded={"both": both.numel() * both.element_size()},
                           stored={"y": y.numel() * y.element_size()})  # fmt: skip
        if place == 2:
            case.shared_out(*given, tiles={"y": (1, block)}, BLOCK=block)
    return receipt("what lies between the products", rows)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each plane as a complex number, turned: independent of how the kernel pairs dimensions."""
    half = x.shape[-1] // 2
    planes = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)[:, None]
    return torch.cat((planes.real, planes.imag), -1)


def check_paged(learner: Callable) -> Receipt:
    rows = []
    shapes = (((1,), 1, 1, 4, 4), ((4, 9), 2, 2, 4, 8), ((17, random.randint(1, 30), 8), 4, 2, 8, 4),
              ((3, 7), 2, 2, 4, 4), ((5, 8), 2, 2, 4, 4))  # fmt: skip
    for place, (lengths, group, kv_heads, size, dim) in enumerate(shapes):
        case = Case(f"{len(lengths)} sequences of {list(lengths)} keys, blocks of {size}, {group} heads on a kv head")
        *given, y = paged_case(lengths, group, kv_heads, size, dim)
        scale, sign = dim**-0.5 * random.uniform(0.6, 1.5), {3: 1, 4: -1}.get(place, 0)
        if sign:  # all scores above 140, or all below -140, which float32 rounds in the fifth digit
            given[0], given[1] = sign * (given[0].abs() + 15), given[1].abs() + 8
        launched = learner, (len(lengths), kv_heads), *given, y, scale, given[3].shape[1]
        constants = {"GROUP": group, "KV_HEADS": kv_heads, "SIZE": size, "DIM": dim}
        seen = case.launch(*launched, **constants)
        case.compare("y", y, over_all(*given, scale), 1e-3 if sign else 1e-5, scale=1.0)
        once = 4 * sum(lengths) * kv_heads * dim
        rows += case.bytes(seen, loaded={"keys": once, "values": once}, stored={"y": y.nbytes},
                           at_most={"q": given[0].nbytes})  # fmt: skip
        if place == 1:
            case.shared_out(*launched, tiles={"y": (1, group)}, **constants)
    return receipt("a paged decode step", rows)


def paged_case(lengths: tuple, group: int, kv_heads: int, size: int, dim: int) -> tuple[Tensor, ...]:
    """q, keys, values, table, lengths, y. Slots that are no sequence's hold NaN."""
    counts = [-(-length // size) for length in lengths]
    blocks = sum(counts) + 2
    order = iter(random.sample(range(blocks), blocks))
    table = torch.full((len(lengths), max(counts)), blocks - 1, dtype=torch.int64)
    keys, values = torch.full((2, blocks, size, kv_heads, dim), float("nan"))
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for block in range(count):
            table[sequence, block] = next(order)
            filled = min(size, length - block * size)
            for pool in (keys, values):
                pool[table[sequence, block], :filled] = 2 * torch.randn(filled, kv_heads, dim)
    q = 2 * torch.randn(len(lengths), kv_heads * group, dim)
    return q, keys.clone(), values.clone(), table, torch.tensor(lengths), torch.full_like(q, float("nan"))


def over_all(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attention over all keys of each sequence at once, in float64."""
    found = []
    group = q.shape[1] // keys.shape[2]
    for query, blocks, length in zip(q.double(), table, lengths.tolist(), strict=True):
        used = blocks[: -(-length // keys.shape[1])]
        key, value = (pool[used].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for pool in (keys, values))
        weights = torch.softmax(scale * torch.einsum("hd,khd->hk", query, key), -1)
        found.append(torch.einsum("hk,khd->hd", weights, value))
    return torch.stack(found)


only_with_triton(
    exercise(
        "matmul-tiles",
        minutes=20,
        difficulty=3,
        hints=(
            "Which addresses does a tile [M, K] of A have, from its rows, its columns and two strides? What must be 0 "
            "behind the end of k?",
            "row[:, None] * a_row + inner[None, :] * a_column, masked in both directions; total += tl.dot(left, "
            "right) in float32; the store masks m and n.",
        ),
    ),
    check_matmul,
)
only_with_triton(
    exercise(
        "between-products",
        minutes=20,
        difficulty=2,
        hints=(
            "Each program turns a whole head: which two halves does it load, and how far apart are tokens in x and in "
            "y?",
            "Load both halves once, in float32, and store two results. Gates stand at row · 2 · width, ups `width` "
            "numbers later.",
        ),
    ),
    check_between,
)
only_with_triton(
    exercise(
        "paged-decode",
        minutes=30,
        difficulty=4,
        hints=(
            "It is the online softmax of exercise 2 with a tile [GROUP, SIZE] of scores. Where does the key at place "
            "p of a block begin, for kv head h?",
            "slot = block number · SIZE + place; the key begins at (slot · KV_HEADS + head) · DIM. Load a block's "
            "keys as [SIZE, DIM], masked behind the length, and multiply them with [GROUP, 1, DIM]; masked scores are "
            "-inf.",
        ),
    ),
    check_paged,
)
