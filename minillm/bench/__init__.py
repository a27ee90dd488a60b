"""Side by side with peers: `python -m minillm bench NAME`. `harness.py` says how a comparison is made."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from minillm.bench.harness import BenchReport, BenchRow
from minillm.measure.provenance import JsonFile, provenance, write_json

__all__ = ["BENCHES", "BenchReport", "BenchRow", "bench", "command"]

BENCHES = {  # name -> module with run(repeats, ...) -> rows, and what is compared
    "comm": ("minillm.bench.comm", "collectives from scratch against torch.distributed's"),
    "data-parallel": ("minillm.bench.data_parallel", "data parallel and ZeRO against torch's DDP, ZeRO-1 and FSDP2"),
    "tensor": ("minillm.bench.tensor", "tensor and sequence parallelism against torch DTensor"),
    "pipeline": ("minillm.bench.pipeline", "pipeline schedules against torch.distributed.pipelining's"),
    "context": ("minillm.bench.context", "rings and Ulysses over a cut sequence against gathering all keys"),
    "tiles": ("minillm.bench.tiles", "attention in tiles against torch's SDPA and whole score matrices, by length"),
    "attention": ("minillm.bench.attention", "backends of paged attention against a padded gather and torch's SDPA"),
    "kernels": ("minillm.bench.kernels", "what lies between products: torch, torch.compile, minillm's Triton kernels"),
    "moe": ("minillm.bench.moe", "a mixture of experts against transformers' Mixtral block and a dense loop"),
    "checkpoint": ("minillm.bench.checkpoint", "sharded checkpoints against torch.distributed.checkpoint"),
    "layouts": (
        "minillm.bench.layouts",
        "a training step in each layout against the peak: MFU, memory, what is hidden",
    ),
    "step": ("minillm.bench.step", "the training step against transformers in a plain loop and under accelerate"),
    "serve": ("minillm.bench.serve", "continuous batching and prefix cache against transformers' generate and manager"),
    "http": ("minillm.api.bench", "HTTP against the engine alone, and the server against transformers serve"),
    "quantize": ("minillm.bench.quantize", "decoding with weights in 8 and 4 bits against float32 and torchao"),
    "adapters": ("minillm.bench.adapters", "many adapters in one batch against a loop, merged models and peft"),
    "ranks": ("minillm.bench.ranks", "decoding on two ranks against one of them, and against what is predicted"),
    "engine-overhead": ("minillm.bench.engine_overhead", "host work of an engine step, without a model"),
    "speculate": ("minillm.bench.speculate", "speculative decoding against none and transformers' assisted generation"),
}
BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.")],
    repeats: Annotated[int | None, typer.Option(help="Pairs of runs per row, 5 or more.")] = None,
    world_sizes: Annotated[str | None, typer.Option(help="Numbers of ranks, such as 2,4.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Bytes of the tensors, such as 64k,1M.")] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Of comm: what the host alone costs, beside torch's own call.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Of serve: decode this model, or a random one such as llama-8b or qwen3-8b."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a page.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Compare minillm with a peer on this machine. Exit status 1 if a result is wrong; a lost row is no error."""
    report = bench(
        name,
        repeats=repeats,
        world_sizes=_whole_numbers("--world-sizes", world_sizes),
        sizes=_whole_numbers("--sizes", sizes),
        host=host or None,
        model=model,
    )
    print(report.markdown() if markdown else report)
    write_json(json_file, report.to_json())
    return 0 if report.ok else 1


def bench(name: str, **options: Any) -> BenchReport:
    """Run one benchmark. options: what its `run` takes; None stands for its default."""
    if name not in BENCHES:
        raise ValueError(f"no benchmark '{name}': choose one of {', '.join(BENCHES)}")
    module, about = import_module(BENCHES[name][0]), BENCHES[name][1]
    run: Callable[..., list[BenchRow]] = module.run
    given = {key: value for key, value in options.items() if value is not None}
    if unknown := given.keys() - inspect.signature(run).parameters.keys():
        raise ValueError(f"benchmark '{name}' has no option {', '.join(sorted(unknown))}: leave it out")
    rows, notes = tuple(run(**given)), tuple(getattr(module, "notes", list)())
    return BenchReport(f"{name}: {about}", provenance(), rows, notes)


def _whole_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """ "64k,1M" -> (65536, 1048576)."""
    if text is None:
        return None
    try:
        parts = [part.strip().lower() for part in text.split(",")]
        found = tuple(int(part.rstrip("kmg")) * BYTES[part[len(part.rstrip("kmg")) :]] for part in parts)
    except (ValueError, KeyError):
        raise ValueError(f"{option} {text} is not a list of whole numbers: write it like 2,4 or 64k,1M") from None
    if min(found) < 1:
        raise ValueError(f"{option} {text} holds {min(found)}: numbers start at 1")
    return found
