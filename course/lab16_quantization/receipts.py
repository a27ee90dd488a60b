"""Lab 16's claims and tables, each a function that the notebook calls in one line; CLAIMS need no learner."""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import nn

from course.kit.answers import answers_of
from course.kit.receipts import Receipt, Row, formula, receipt, row, titled
from course.lab16_quantization import experiments, formulas
from course.lab16_quantization import experiments_breaks as breaks
from course.lab16_quantization.experiments import Method
from course.shared.table import Table, table
from minillm.predict.model import kv_bytes_per_token, parameters
from minillm.predict.serving import quantization as predict
from minillm.quantize import Int, nbytes
from minillm.quantize.prune import low_rank, two_of_four_mask

ANSWERS = answers_of("16_quantization")

# Bytes.


@titled("bits of a weight, bytes of the target", open_rows=3, show="groups of 128|of it embedding")
def bytes_of_formats(guess_bits: float | None = None) -> Iterator[Row]:
    """Formulas beside what layers keep, and the whole model. guess_bits: the reader's, for int4 in groups of 32."""
    yield formula("int4, groups of 32: bits per weight", predict.bits_per_weight(4, 32), guess=guess_bits)
    yield formula("int4, groups of 128", predict.bits_per_weight(4, 128))
    yield formula("NF4, blocks of 64, scales in 8 bits", predict.bits_per_weight(4, 64, scale_bits=8 + 32 / 256))
    config = experiments.target().config
    parts = parameters(config)
    rounded = parts.attention + parts.mlp
    kept = parts.total - rounded
    for name, bits, fixed in (
        ("int8", _bits_of_channels(config), 0),
        ("int4, groups of 32", predict.bits_per_weight(4, 32), 0),
        ("NF4", predict.bits_per_weight(4, 64, scale_bits=8), _double_scales(config)),
        ("int4, groups of 128", predict.bits_per_weight(4, 128), 0),
    ):
        model, _ = experiments.in_format(name)
        yield row(f"the target in {name}", round(4 * kept + rounded * bits / 8 + fixed), nbytes(model), "B")
    yield formula("    of it embedding and norms, in float32", 4 * kept, "B")
    yield formula("the target in float32", 4 * parts.total, "B")


def _bits_of_channels(config) -> float:
    """int8 with a 16-bit scale for each output: bits per weight over all layers."""
    outputs = sum(m.out_features for m in experiments.target().blocks.modules() if type(m) is nn.Linear)
    parts = parameters(config)
    return 8 + 16 * outputs / (parts.attention + parts.mlp)


def _double_scales(config) -> int:
    """Bytes of NF4 beside codes and 8-bit scales: 4 for every 256 scales of a layer, and 4 for its mean."""
    counts = [m.weight.numel() // 64 for m in experiments.target().blocks.modules() if type(m) is nn.Linear]
    return sum(4 * -(-count // 256) + 4 for count in counts)


# Error.


def error_of_rounding(guess_db: float | None = None) -> Receipt:
    """Bennett's formulas on evenly distributed weights, then on the target's. guess_db: the reader's, per bit."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        weight = torch.rand(512, 1024) * 2 - 1
    rows = [formula("a bit gains, dB", 20 * math.log10(2), guess=guess_db)]
    for bits in (4, 8):
        format = Int(bits=bits, scale_dtype=torch.float32)
        grid = format.grid(weight)
        error = format.nearest(weight, grid) - weight
        step = float(grid.scale.square().mean().sqrt())
        rows.append(row(f"int{bits}, evenly distributed weights: mean square of the error, Δ²/12",
                        predict.mean_squared_error(step), float(error.square().mean()), "", 0.02))  # fmt: skip
        rows.append(
            row("    largest error / step, at most 1/2", True, float((error / grid.scale).abs().max()) <= 0.5001)
        )
    trained = experiments.layers()["0.attention.q_proj"]
    for bits in (4, 8):
        format = Int(bits=bits, group=32, scale_dtype=torch.float32)
        grid = format.grid(trained)
        expected = predict.mean_squared_error(float(grid.scale.square().mean().sqrt()))
        error = format.nearest(trained, grid) - trained
        rows.append(row(f"int{bits} in groups of 32, a trained layer", expected, float(error.square().mean()), "", 0.1))
    rows += _outlier()
    return receipt("the error of rounding", rows, open_rows=3, show="twice as large|int4 in groups")


def _outlier() -> list[Row]:
    """One weight twice as large as all others costs its group a bit."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        weight = torch.rand(512, 1024) * 2 - 1
    louder = weight.clone()
    louder[:, 0] = 2.0
    noise = []
    for each in (weight, louder):
        format = Int(bits=4, scale_dtype=torch.float32)
        rounded = format.nearest(each, format.grid(each))
        noise.append(10 * math.log10(float((rounded - each)[:, 1:].square().mean())))
    return [row("int4, one weight of each output twice as large: noise of the others, dB", 20 * math.log10(2),
                noise[1] - noise[0], "", 0.05)]  # fmt: skip


def gptq_by_formula(size: int = 48, outputs: int = 1500, step: float = 0.05) -> Receipt:
    """What the pivots of the Cholesky factor say about GPTQ's error, with even steps."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        mix = torch.randn(size, size, dtype=torch.float64)
        weight = torch.randn(outputs, size, dtype=torch.float64)
    hessian = mix @ mix.T / size + 0.05 * torch.eye(size, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)

    def nearest(column, j):
        return torch.round(column / step) * step

    def output_error(rounded):
        return float((((rounded - weight) @ hessian) * (rounded - weight)).sum(1).mean())

    rounded = ANSWERS.gptq_columns(weight, upper, nearest)
    by_gptq = predict.gptq_output_error(step, upper.diagonal().tolist())
    by_nearest = predict.nearest_output_error(step, hessian.diagonal().tolist())
    return receipt(
        f"mean square error of an output, {size} correlated inputs",
        [
            row("to nearest: Δ²/12 · Σ H_jj", by_nearest, output_error(nearest(weight, 0)), "", 0.05),
            row("GPTQ: Δ²/12 · Σ 1 / U_jj²", by_gptq, output_error(rounded), "", 0.05),
            formula("    times less", by_nearest / by_gptq),
        ],
    )


def methods(found: dict[str, dict[str, Method]]) -> Table:
    """Rounding to nearest, AWQ and GPTQ on the target, with and without planted outliers."""
    names = {"rtn": "to nearest", "awq": "AWQ", "gptq": "GPTQ"}
    columns = [f"{what}, {model}" for model in found for what in ("outputs", "text")]
    return table(
        "int4 in groups of 128: error of the layers' outputs, and change of the text's bits per byte",
        ("method", *columns),
        [
            (names[name], *(cell for each in found.values()
                            for cell in (f"{each[name].output_error:.3%}", f"{each[name].change:+.2%}")))
            for name in experiments.METHODS
        ],
    )  # fmt: skip


def methods_help() -> Receipt:
    """With planted outliers: the same text before, and AWQ loses less of it after."""
    plain, model = experiments.plain_bits(), experiments.planted()
    before = experiments.text_bits(model)
    found = {method: experiments.with_method(experiments.planted(), method) for method in ("rtn", "awq")}
    lower = found["awq"].output_error / found["rtn"].output_error
    return receipt(
        "the target with planted outliers, int4 in groups of 128",
        [
            row("bits per byte before, equal to the target's", plain, before, "", 1e-4),
            row("AWQ: output error less than half of that of rounding to nearest", True, lower < 0.5),
            row("AWQ: bits per byte lost, less than half as much", True, found["awq"].change < found["rtn"].change / 2),
        ],
    )


# Keys and values.


def cache(quantize_kv: Callable | None = None) -> Receipt:
    """Tokens that fit, by formula and in the engine's pool; bits per byte with rounded keys and values."""
    from minillm.serve import LLM

    quantize_kv = quantize_kv or ANSWERS.quantize_kv
    model = experiments.target()
    config = model.config
    blocks = {kind: LLM(model, num_blocks=8, kv_dtype=kind).cache.nbytes for kind in (None, "int8")}
    sizes = [kv_bytes_per_token(config, 4), kv_bytes_per_token(config, 1, scale_bytes=4)]
    change = experiments.text_bits(model, experiments.Rounding(quantize_kv)) / experiments.plain_bits() - 1
    wide = 16 / predict.cache_bits_per_number(8, 128, scale_bits=32)
    return receipt(
        "keys and values in int8, a 32-bit scale per token and head",
        [
            formula("head_dim 128: tokens in the same room, against 16 bits", wide),
            row("the target's engine, head_dim 32, against float32: times as many", sizes[0] / sizes[1],
                blocks[None] / blocks["int8"], "", 1e-9),
            row("bits per byte with your rounding, relative change: below 0.1 %", True, abs(change) < 1e-3),
            row("    change in %", None, 100 * change),
            formula("Llama 3 70B, 8 heads instead of 64 (GQA): times as many tokens", 64 / 8),
        ],
        open_rows=5,
    )  # fmt: skip


# Leaving out.


def leaving_out() -> Table:
    """The target pruned, cut to low rank or rounded, without training afterwards."""
    lines = []
    for name, bits, change in formulas.WAYS:
        lines.append((name, bits, f"{experiments.with_weights(change):+.2%}"))
    return table(
        "every layer of the target changed, products in float32, nothing trained afterwards",
        ("what was done", "bits per weight", "bits per byte, change"),
        lines,
    )


def singular_values(rank: int = 64) -> Receipt:
    """The error of a cut-off matrix is that of the singular values left out; 2:4 keeps the larger half."""
    name, weight = next(iter(experiments.layers().items()))
    left, right = low_rank(weight, rank)
    values = torch.linalg.svdvals(weight.double()).tolist()
    measured = float((weight.double() - left.double() @ right.double()).norm())
    mask = two_of_four_mask(weight)
    values_, places = ANSWERS.two_of_four(weight)
    bits = (16 * values_.numel() + 2 * places.numel()) / weight.numel()
    return receipt(
        f"layer {name}, {weight.shape[0]} x {weight.shape[1]}",
        [
            row(f"rank {rank}: ‖W - A B‖", predict.low_rank_error(values, rank), measured, "", 1e-4),
            formula("    largest rank that takes fewer numbers", predict.low_rank_saves(*weight.shape)),
            row("2:4: weights kept", weight.numel() // 2, int(mask.sum())),
            row("    bits per weight when packed, of 16", 9, bits),
        ],
    )


# Break it.


def programs(verdict: Callable) -> Table:
    """The six programs: the learner's verdict, and that the size of the error does not decide."""
    lines = []
    for name, (weight, rounded) in breaks.all_programs().items():
        error = float((rounded - weight).norm() / weight.norm())
        groups = rounded.unflatten(1, (-1, 64)).flatten(0, 1)
        most = max(len(values.unique()) for values in groups)
        lines.append((name, verdict(weight, rounded, 64), len(rounded.unique()), most, f"{error:.1%}"))
    columns = ("program", "your verdict", "values in the matrix", "values in a group, at most", "error, relative")
    return table("six programs, 128 x 256, groups of 64", columns, lines)


def what_bugs_cost(group: int = 32) -> Table:
    """Every layer of the target through each of the programs, with and without planted outliers."""
    lines = []
    for name in ("B", "D", "C", "A", "E"):
        program = breaks.PROGRAMS[name]
        changes = [
            experiments.with_program(make(), program, group) for make in (experiments.target, experiments.planted)
        ]
        lines.append((name, breaks.BUGS[name], *(f"{change:+.1%}" for change in changes)))
    columns = ("program", "bug", "as trained", "planted outliers")
    return table("the target in int4: change of the bits per byte", columns, lines)


def verdicts() -> Receipt:
    """The six programs, judged."""
    rows = [
        row(f"program {name}", breaks.BUGS[name], ANSWERS.verdict(weight, rounded, 64))
        for name, (weight, rounded) in breaks.all_programs().items()
    ]
    return receipt("what went wrong", rows)


# Peers.


def peer() -> Receipt:
    """Our int4 bytes as compressed-tensors reads them, where it is installed."""
    if find_spec("compressed_tensors.compressors.pack_quantized") is None:
        return receipt("compressed-tensors 0.18 is not installed here: pip install compressed-tensors", [])
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        weight = torch.randn(64, 256)
    packed, scale = ANSWERS.quantize_int4(weight, 32)
    theirs = unpack_from_int32(packed.view(torch.int32), 4, weight.shape)  # eight codes to a number
    back = (theirs.float().unflatten(1, (-1, 32)) * scale.float()[..., None]).flatten(1)
    same = int((back == ANSWERS.dequantize_int4(packed, scale)).sum())
    return receipt("compressed-tensors reads the bytes of exercise 1", [row("weights equal to ours", 64 * 256, same)])


CLAIMS = (
    bytes_of_formats,
    error_of_rounding,
    gptq_by_formula,
    methods_help,
    cache,
    singular_values,
    verdicts,
)
