"""Lab 25's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, Row, formula, receipt, row, titled
from course.lab25_kernels import experiments, formulas, launches
from course.lab25_kernels import experiments_breaks as breaks
from course.lab25_kernels.experiments import Compiled, Fusion, Losing
from course.shared.kernels import INSTALLED, MISSING, launch
from course.shared.table import Table, seconds, table
from minillm.predict import kernels as predict
from minillm.predict.planner.architectures import architecture

ANSWERS = answers_of("25_kernels")
TILES = (16, 32, 64)

# Bytes.


def fusion(found: Fusion, guess: float | None = None) -> Receipt:
    """Two kernels beside one, by the bytes that each moves and by the clock. guess: the reader's, for the same
    shape."""
    rows = [
        formula("relu(x + b), b as large as x: two kernels / one, bytes", _ratio(True), guess=guess),
        formula("    b one row that stays in a cache", _ratio(False)),
    ]
    for name, what in (("same", "b as large as x"), ("row", "b one row")):
        if name in found.compiled:
            measured = found.eager[name] / found.compiled[name]
            expected = _ratio(name == "same", fetching=True)
            rows.append(row(f"{what}: two kernels / one, time on a CPU", expected, measured, "", 0.2, noisy=True))
            share = found.roof[name] / found.compiled[name]
            rows.append(row("    the compiled kernel's share of the roof", 1.0, share, "", 0.25, noisy=True))
        else:
            rows.append(row(f"{what}: two kernels / the roof, time", None, found.eager[name] / found.roof[name]))
    title = f"relu(x + b), {experiments.NUMBERS:,} numbers, one thread"
    return receipt(f"{title}. {found.missing}" if found.missing else title, rows, open_rows=6)


def _ratio(same: bool, fetching: bool = False) -> float:
    """Bytes of two kernels over those of one. same: the bias is as large as x. fetching: a line that is written and was
    not read is fetched first, as on a CPU; the second kernel writes in place, so its lines were read."""
    n, inputs = experiments.NUMBERS, 2 if same else 1
    two = [predict.elementwise(n, inputs, 4), predict.elementwise(n, 1, 4)]
    one = predict.fused(two, 4 * n, name="bias and relu")
    fetched = 4 * n if fetching else 0
    return (sum(kernel.bytes for kernel in two) + fetched) / (one.bytes + fetched)


def traced_bias(bias_relu: Callable | None = None, n: int = 1000, row_width: int = 50) -> Receipt:
    """Bytes that the learner's kernel moves between memory and the programs, every address once."""
    if not INSTALLED:
        return receipt(MISSING, [])
    bias_relu, rows = bias_relu or ANSWERS.bias_relu, []
    for name, width, inputs in (("b as large as x", n, 2), ("b one row", row_width, 1)):
        seen = launch(bias_relu, (-(-n // 64),), _numbers(n), _numbers(width), torch.empty(n), n, width, BLOCK=64)
        expected = predict.elementwise(n, inputs, 4).bytes + (4 * width if inputs == 1 else 0)
        rows += [
            row(f"{name}: bytes of memory", expected, sum(seen.distinct.values()), "B"),
            row("    asked for by programs", 12 * n, seen.bytes, "B"),
        ]
    return receipt(f"relu(x + b) of {n:,} numbers, traced", rows, open_rows=1, show="b one row")


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Products.


@titled("a product in square tiles", open_rows=1, show="tiles of 32,|GPU")
def tiles(matmul_tiles: Callable | None = None, guess: float | None = None, size: int = 64) -> Iterator[Row]:
    """Bytes by tile: the model, and the trace. guess: the reader's, for tiles of 128 against 32 at 4,096."""
    whole = {tile: predict.tiled_matmul(4096, 4096, 4096, tile, tile, 2) for tile in (32, 128)}
    yield formula("4,096³ in float16: bytes with tiles of 32 / of 128", whole[32].bytes / whole[128].bytes, guess=guess)
    for tile, kernel in whole.items():
        bound = kernel.seconds(formulas.BANDWIDTH, formulas.PEAK)
        yield formula(f"    tiles of {tile}: time on an H100 if all of it came from HBM", bound, "s")
    matmul_tiles = matmul_tiles or ANSWERS.matmul_tiles
    for tile in TILES if INSTALLED else ():
        a, b, c = _numbers(size, size).half(), _numbers(size, size).half(), torch.empty(size, size).half()
        grid = (-(-size // tile),) * 2
        seen = launch(matmul_tiles, grid, a, b, c, size, size, size, size, 1, size, 1, M=tile, N=tile, K=16)
        expected = predict.tiled_matmul(size, size, size, tile, tile, 2)
        yield row(f"{size}³, tiles of {tile}, {seen.programs} programs: bytes", expected.bytes, seen.bytes, "B")
    for tile, found in experiments.tile_seconds(matmul_tiles).items():
        yield row(f"4,096³ on this GPU, tiles of {tile}: time", None, found, "s")


# Launches.


@titled("kernels of a decoding layer")
def layer(guess: float | None = None) -> Iterator[Row]:
    """Launches by formula and counted on a small model. guess: the reader's, for plain torch."""
    before, after = ([k.launches for k in _layer(1, fused)] for fused in (False, True))
    yield row("plain torch", sum(before), launches.of_a_layer(), guess=guess)
    joined = sum(before) - 3  # two of q k v, one of gate and up
    yield row("products that share an input joined", joined, launches.of_a_layer(products_joined=True))
    yield row("rotation and gate one kernel each, too", sum(after),
              launches.of_a_layer(products_joined=True, kernels=True))  # fmt: skip


def _layer(batch: int, fused: bool, context: int = 1024) -> list[predict.Kernel]:
    return predict.decode_layer(architecture("llama-3-8b"), batch, context, fused=fused)


def layer_table(batch: int = 8) -> Table:
    """Each kernel of a layer of the 8B model, before and after fusing."""
    lines = []
    for plain, fused in zip(_layer(batch, False), _layer(batch, True), strict=True):
        bound = fused.seconds(formulas.BANDWIDTH, formulas.PEAK)
        lines.append((plain.name, plain.launches, fused.launches, f"{plain.bytes / 1e6:.2f}",
                      f"{fused.bytes / 1e6:.2f}", f"{fused.flops / 1e6:.1f}", seconds(bound)))  # fmt: skip
    totals = [[sum(getattr(k, what) for k in _layer(batch, fused)) for fused in (False, True)]
              for what in ("launches", "bytes", "flops")]  # fmt: skip
    bound = predict.step_seconds(_layer(batch, True), formulas.BANDWIDTH, formulas.PEAK, 0.0)
    lines.append(("all", *totals[0], f"{totals[1][0] / 1e6:.2f}", f"{totals[1][1] / 1e6:.2f}",
                  f"{totals[2][1] / 1e6:.1f}", seconds(bound)))  # fmt: skip
    columns = ("kernel", "launches", "fused", "MB", "fused", "MFLOP", "time bound, fused")
    return table(f"a layer of Llama 3 8B, {batch} sequences of 1,024 tokens, one H100, by formula", columns, lines)


# Compiler.


def compiled(found: Compiled) -> Table | Receipt:
    """What torch.compile made of the block."""
    if found.missing:
        return receipt(found.missing, [])
    saved = found.eager - found.hundredth
    calls = f"{found.first / saved:,.0f}" if saved > 0 else "never"
    return table(
        "torch.compile of the block, one thread",
        ("", "found"),
        [
            ("operations in the graph", found.operations),
            ("kernels after fusing", len(found.kernels)),
            ("    name of the first", found.kernels[0]),
            ("guards on the arguments", len(found.guards)),
            ("the first call", seconds(found.first)),
            ("the hundredth", seconds(found.hundredth)),
            ("a call in plain torch", seconds(found.eager)),
            ("calls until the first has paid for itself", calls),
        ],
    )


def graphs_of(module: type[nn.Module], calls: int = 6) -> Table:
    """Graphs that torch.compile has made after each call, with another number of rows each time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        counts = experiments.graphs_by_call(module(4, 1.0), [torch.randn(rows + 2, 4) for rows in range(calls)])
    head = tuple(f"call {number}" for number in range(1, calls + 1))
    return table(f"{module.__name__}: graphs compiled so far", ("", *head), [("graphs", *counts)])


def one_graph() -> Receipt:
    """The block of exercise 7 before and after."""

    class Slow(nn.Module):
        def __init__(self, width: int, limit: float):
            super().__init__()
            self.linear, self.limit, self.calls = nn.Linear(width, width), limit, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.linear(x)
            return y / 2 if y.abs().max().item() > self.limit else y

    inputs = [_numbers(rows, 4) for rows in range(2, 6)]
    slow, steady = (experiments.graphs_by_call(module(4, 1.0), inputs) for module in (Slow, ANSWERS.Steady))
    rows = [
        row("the slow block: graphs after 4 calls, at least one a call", True, slow[-1] >= 4),
        row("the steady one", 1, steady[-1]),
    ]
    return receipt("graphs compiled", rows)


# Graphs.


@titled(
    "a decode step of Llama 3 8B on one H100, contexts of 1,024, 15 µs a launch, 1 µs in a graph",
    open_rows=2,
    show="step of 1",
)
def graph_pays(guess: float | None = None) -> Iterator[Row]:
    """guess: the reader's, for the batch from which bytes take as long as launches, in plain torch."""
    first = formulas.first_batch_without_waiting(1024, fused=False)
    yield formula("sequences from which plain torch no longer waits for launches", first, guess=guess)
    yield formula("    with minillm's fusing", formulas.first_batch_without_waiting(1024, fused=True))
    for fused, name in ((False, "plain torch"), (True, "fused")):
        yield formula(f"{name}: launches of a step", formulas.launches(fused))
    for how in (formulas.PLAIN, formulas.FUSED, formulas.RECORDED):
        yield formula(f"{how}: a step of 1 sequence", formulas.step_seconds(1, 1024, how), "s")


# Break it, and where it loses.


def programs(verdict: Callable) -> Table | Receipt:
    """The six programs: the learner's verdict, and what values alone say."""
    if not INSTALLED:
        return receipt(MISSING, [])
    lines = []
    for name in breaks.BUGS:
        run = breaks.program(name)
        x = _numbers(3, 77).half()
        sums, seen = run(x)
        off = float((sums.double() - x.double().sum(1)).abs().max())
        lines.append((name, verdict(breaks.program(name)), f"{off:.1e}", len(seen.outside), len(seen.races)))
    columns = ("program", "your verdict", "error of the sums", "places outside", "races")
    return table("six programs on 3 rows of 77 numbers", columns, lines)


def verdicts() -> Receipt:
    """The six programs, judged."""
    if not INSTALLED:
        return receipt(MISSING, [])
    rows = [row(f"program {name}", bug, ANSWERS.verdict(breaks.program(name))) for name, bug in breaks.BUGS.items()]
    return receipt("which test finds which bug", rows)


def where_it_loses(found: Losing) -> Table | Receipt:
    """Compiled beside eager."""
    if found.missing:
        return receipt(found.missing, [])
    lines = [(name, seconds(eager), seconds(one), f"{eager / one:.2f}") for name, (eager, one) in found.times.items()]
    return table("one thread, every result a new tensor", ("", "eager", "compiled", "times faster"), lines)


def design() -> Table:
    """The numbers of D1: 8 sequences of 1,024 tokens."""
    lines = []
    for fused in (False, True):
        lines.append(("fused" if fused else "plain torch", formulas.launches(fused),
                      seconds(formulas.launches(fused) * formulas.LAUNCH_S),
                      seconds(formulas.bytes_s(8, 1024, fused))))  # fmt: skip
    return table("D1: the 8B model, 8 sequences of 1,024 tokens, one H100, 15 µs a launch, by formula",
                 ("", "launches", "bound by launches", "bound by bytes"), lines)  # fmt: skip


def bytes_of_fusing() -> Receipt:
    """P111."""
    rows = [formula("bias as large as x", _ratio(True)), formula("bias that stays in a cache", _ratio(False))]
    return receipt("relu(x + b): bytes of two kernels over those of one", rows)


CLAIMS = (bytes_of_fusing, traced_bias, tiles, layer, one_graph, graph_pays, verdicts)
