"""Drills about kernels: bytes and time of one, what fusing saves, when launches are the limit, what tiles read."""

from random import Random

from course.lab24_interview.numbers import n
from course.shared.decisions import Decision
from minillm.predict.kernels import elementwise, tiled_matmul


def kernel_time(draw: Random) -> Decision:
    millions, bits, terabytes = draw.choice((16, 67, 268)), draw.choice((16, 32)), draw.choice((1.6, 2, 3.35))
    value = elementwise(millions * 10**6, 2, bits // 8).seconds(terabytes * 1e12) * 1e6
    return Decision(
        f"Microseconds of x + y for {millions} million numbers of {bits} bits at {terabytes} TB/s?",
        value,
        "µs",
        f"Two arrays are read and one is written: 3 · {millions} M · {bits // 8} B / {terabytes} TB/s = "
        f"{n(value, 3)} µs.",
        slips={2 / 3: "The result is written, too: three arrays.", 8: "The numbers are in bits."},
        tolerance=0.05,
    )


def passes_saved(draw: Random) -> Decision:
    kernels = draw.choice((2, 3, 4, 5, 6, 8))
    return Decision(
        f"A chain of {kernels} element-wise kernels, each with one input and one output of the same size, "
        f"becomes one. How "
        "many times fewer bytes does it move?",
        kernels,
        "",
        f"Each of the {kernels} reads and writes an array; fused, one is read and one is written.",
        tolerance=0.01,
    )


def launch_bound(draw: Random) -> Decision:
    layers, kernels, micros = draw.choice((16, 32, 80)), draw.choice((12, 14, 25)), draw.choice((5, 10, 15))
    value = layers * kernels * micros / 1e3
    return Decision(
        f"Milliseconds that the host needs to launch a step of {layers} layers with {kernels} kernels each, at "
        f"{micros} µs a "
        "launch?",
        value,
        "ms",
        f"{layers} · {kernels} · {micros} µs = {n(value, 3)} ms.",
        slips={1000: "That is in microseconds."},
        tolerance=0.02,
    )


def tile_reads(draw: Random) -> Decision:
    size, tile = draw.choice((1024, 4096, 8192)), draw.choice((32, 64, 128, 256))
    value = tiled_matmul(size, size, size, tile, tile, 1).read / (2 * size * size)
    return Decision(
        f"A product of two {size} x {size} matrices in tiles of {tile} x {tile}: how many times do its programs "
        f"read each of "
        "the matrices?",
        value,
        "",
        f"Once for each row or column of tiles: {size} / {tile} = {n(value)}.",
        slips={size: "That is how often each number is multiplied: a tile serves many products."},
    )
