"""`python -m minillm quantize --model DIR --bits 4 --method awq --out DIR`: a folder of a half or a quarter the size.

The folder is in compressed-tensors' layout, which transformers loads, and `generate --model`. `--report` says what it
cost and gained, on held-out text.
"""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

from minillm.cli.folders import check_new_folder
from minillm.cli.given import is_given
from minillm.data import Tokenizer, corpus, tokenize
from minillm.files import check_new
from minillm.measure.provenance import JsonFile, provenance, write_json
from minillm.model import load_hf
from minillm.model.generate import device_of, folder_of
from minillm.model.hf.load import stored_dtype
from minillm.quantize import METHODS, NF4, Float8, Format, Int, Settings, quantize
from minillm.quantize.calibrate import windows_of
from minillm.quantize.folder import layout_of_format, save_quantized
from minillm.quantize.quality import compare, table

FORMATS = ("int", "float8", "nf4")
GROUP = 128  # of 4 bits, where nothing is said


def command(
    invocation: typer.Context,
    model: Annotated[str, Option(metavar="NAME|PATH", help="target, draft, or a Hugging Face folder.")] = "target",
    method: Annotated[str, Option(help=f"{', '.join(METHODS)}.")] = "rtn",
    bits: Annotated[int, Option(help="Of an integer: 4 or 8.")] = 4,
    group: Annotated[
        int | None,
        Option(help="Inputs that share a scale, 0 = all of an output.", show_default="128 for 4 bits, 0 for 8", min=0),
    ] = None,
    asymmetric: Annotated[bool, Option("--asymmetric", help="A zero point for each group of integers.")] = False,
    format: Annotated[str, Option(help=f"{', '.join(FORMATS)}; nf4 has no layout to write.")] = "int",
    skip: Annotated[str, Option(metavar="NAMES", help="Layers to leave, such as down_proj,blocks.0.")] = "",
    data: Annotated[
        str | None, Option(metavar="PATH", help="Text or folder to calibrate on.", show_default="the standard library")
    ] = None,
    windows: Annotated[int, Option(help="Windows of text to calibrate on.", min=1)] = 32,
    seq_len: Annotated[int, Option(help="Tokens a window; at most the model's context.", min=1)] = 256,
    out: Annotated[Path | None, Option(metavar="PATH", help="Folder to write, a new one.")] = None,
    report: Annotated[bool, Option("--report", help="Compare with the original on held-out text.")] = False,
    device: Annotated[str, Option(help="cpu, cuda, ...")] = "cpu",
    json_file: JsonFile = None,
) -> int:
    """Quantize a model's weights, write them, and say what it cost and gained."""
    if out is None and not report:
        raise ValueError("there is nothing to make: say --out FOLDER, --report or both")
    if json_file is not None and not report:
        raise ValueError("--json writes the rows of --report: add it, or leave --json out")
    wanted = _format(invocation, format, bits, group, asymmetric)
    settings = Settings(wanted, method, tuple(part for part in skip.split(",") if part))
    if data is not None and not (settings.needs_text or report):
        raise ValueError(f"--data {data} is not read by --method {method}: calibrate with another, or add --report")
    if out is not None:
        layout_of_format(wanted, settings.quantizes_inputs)
        check_new_folder("--out", out)
        check_new(out)
    folder, where = folder_of(model), device_of(device)
    original, tokenizer = load_hf(folder, device=where, dtype=torch.float32), Tokenizer.load(folder)
    text = corpus(data) if settings.needs_text or report else None
    seq_len = min(seq_len, original.config.max_seq_len)
    inputs = windows_of(tokenize(text, tokenizer, "train"), windows, seq_len) if settings.needs_text else None
    quantized = copy.deepcopy(original) if report else original
    typer.echo(quantize(quantized, settings, inputs, progress=True))
    if out is not None:
        save_quantized(quantized.to(stored_dtype(folder)), out, folder)
        typer.echo(f'{out} is written: try `python -m minillm generate --model {out} "def "`')
        quantized = load_hf(out, device=where, dtype=torch.float32)
    if report:
        name = f"{method} {format}" + (f"{bits}" if format == "int" else "")
        rows = compare(original, quantized, tokenize(text, tokenizer, "validation"), name, seq_len=seq_len)
        typer.echo(table(list(rows)))
        write_json(json_file, {"provenance": provenance(), "rows": [asdict(row) for row in rows]})
    return 0


def _format(invocation: typer.Context, format: str, bits: int, group: int | None, asymmetric: bool) -> Format:
    if format not in FORMATS:
        raise ValueError(f"--format {format} is unknown: use one of {', '.join(FORMATS)}")
    of_integers = {"bits": is_given(invocation, "bits"), "asymmetric": asymmetric}
    if format != "int" and (given := [name for name, there in of_integers.items() if there]):
        raise ValueError(f"--{given[0]} is for integers, --format {format} has its own: leave --{given[0]} out")
    size = {} if group is None else {"group": group or None}
    if format == "int":
        return Int(bits=bits, symmetric=not asymmetric, **({"group": GROUP} if bits == 4 else {}) | size)
    return (Float8 if format == "float8" else NF4)(**size)
