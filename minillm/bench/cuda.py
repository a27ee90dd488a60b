"""`make cuda`: everything that is claimed of GPUs, proven on the ones of this machine in about a quarter of an hour.

Each part is a process of its own with a limit of time. A part that fails, hangs or finds too few GPUs does not keep the
others from running; the exit status says whether all that ran was right. What each part measured goes to
OUT/cuda_NAME.json with its provenance, how each part ended to OUT/cuda_run.json, which keeps what earlier runs said of
other parts, and what it printed to build/cuda/.
`python -m minillm.bench.gpu_page` makes docs/gpu.md of these files.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from minillm.measure.provenance import provenance, summary, write_json

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "cuda"
RUN = "cuda_run.json"
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-m", "cuda")
APART = ("-m", "pytest", "-q", "-n", "4", "-m", "cuda")  # most of their time is a compiler's, on the host
MARK = "mark.cuda"
RANKS = "tests/engine/gpus"
GRACE_S = 10.0  # between asking a part to end and ending it
TAIL = 15  # lines shown of a part that failed


@dataclass(frozen=True)
class Part:
    """argv: arguments of Python; {json} stands for the file of its results, {tests} for `tests()`. gpus: how many it
    needs at least."""

    name: str
    about: str
    argv: tuple[str, ...]
    limit_s: float
    gpus: int = 1

    @property
    def file(self) -> str | None:
        """Where its results go, if it has any beside passing."""
        return f"cuda_{self.name}.json" if any("{json}" in argument for argument in self.argv) else None


@dataclass(frozen=True)
class Outcome:
    """status: passed, failed, timed out or skipped. note: the last line it printed, or why it was skipped. gpus, where:
    of the machine that it ran on."""

    name: str
    status: str
    seconds: float
    note: str
    gpus: int = 0
    where: str = ""


def _bench(name: str, about: str, limit_s: float, *argv: str, gpus: int = 1) -> Part:
    return Part(name, about, ("-m", "minillm", "bench", *argv, "--json", "{json}"), limit_s, gpus)


PARTS = (  # what matters most comes first: time may run out
    Part("machine", "this machine's card", ("-m", "minillm", "machine", "--refresh", "--json", "{json}"), 90),
    Part(
        "ranks",
        "NCCL: the oracle, the labs' scripts under torchrun, a profiled step and a checkpoint of each layout",
        (*PYTEST, RANKS),
        330,
        gpus=2,
    ),
    Part("tests", "kernels, engine and offloading on one GPU", (*APART, "{tests}"), 240),
    _bench("layouts", "a training step of a 1B-shaped model in each layout", 240, "layouts"),
    _bench("decode_llama_8b", "decoding of an 8B-shaped Llama", 200, "serve", "--model", "llama-8b"),
    _bench("decode_qwen3_8b", "decoding of an 8B-shaped Qwen3", 240, "serve", "--model", "qwen3-8b"),
    _bench("attention", "backends of paged attention", 60, "attention"),
    _bench("kernels", "what lies between products, compiled and in Triton", 90, "kernels"),
    _bench("comm", "collectives from scratch beside NCCL's", 90, "comm", gpus=2),
    _bench("step", "the training step beside transformers'", 90, "step"),
    _bench("speculate", "speculative decoding", 90, "speculate"),
    _bench("serve", "continuous batching of the committed model", 120, "serve"),
)
app = typer.Typer(add_completion=False)


@app.command()
def command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = ROOT / "figures",
    parts: Annotated[str | None, typer.Option(help="Some of them only, such as ranks,layouts.")] = None,
    minutes: Annotated[float, typer.Option(help="In all; what does not fit is skipped.")] = 15.0,
) -> None:
    """Run the parts that fit this machine's GPUs, one after the other."""
    gpus = torch.cuda.device_count()
    if not gpus:
        print("torch finds no GPU here: nothing was run, and nothing was measured.")
        return
    outcomes = run(chosen(parts), out, gpus, 60 * minutes)
    raise typer.Exit(0 if all(outcome.status in ("passed", "skipped") for outcome in outcomes) else 1)


def chosen(names: str | None) -> list[Part]:
    """The parts of these names, in the order of PARTS; None: all. ValueError for a name that is none."""
    if names is None:
        return list(PARTS)
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in {part.name for part in PARTS}]:
        raise ValueError(f"--parts has no {unknown[0]}: choose among {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if part.name in wanted]


def run(parts: Sequence[Part], out: Path, gpus: int, limit_s: float) -> list[Outcome]:
    """Each part's outcome, also kept in OUT/cuda_run.json after each of them."""
    out.mkdir(parents=True, exist_ok=True)
    made, chosen = provenance("make cuda"), {part.name for part in parts}
    earlier = json.loads((out / RUN).read_text())["parts"] if (out / RUN).exists() else []
    earlier = [outcome for outcome in earlier if outcome["name"] not in chosen]
    give_up_at, outcomes = time.monotonic() + limit_s, []
    for part in parts:
        left = give_up_at - time.monotonic()
        outcome = _skipped(part, gpus, left) or run_part(part, out, min(part.limit_s, left))
        outcome = replace(outcome, gpus=gpus, where=summary(made))
        print(f"{outcome.name:<16} {outcome.status:<9} {outcome.seconds:5.0f} s  {outcome.note}", flush=True)
        outcomes.append(outcome)
        write_json(out / RUN, {"provenance": made, "parts": [*earlier, *map(asdict, outcomes)]})
    return outcomes


def _skipped(part: Part, gpus: int, left_s: float) -> Outcome | None:
    why = None
    if part.gpus > gpus:
        why = f"it needs {part.gpus} GPUs, and there is {gpus}"
    elif left_s <= 0:
        why = "no time was left"
    return why and Outcome(part.name, "skipped", 0.0, why)


def run_part(part: Part, out: Path, limit_s: float) -> Outcome:
    """Runs it to its end or to the limit. Nothing that it started is left."""
    out = out.resolve()  # named from here, where it can be: results keep the command that made them
    file = part.file and (out.relative_to(ROOT) if out.is_relative_to(ROOT) else out) / part.file
    argv = [sys.executable]
    for argument in part.argv:
        argv += tests() if argument == "{tests}" else [argument.replace("{json}", str(file))]
    LOGS.mkdir(parents=True, exist_ok=True)
    log, start = LOGS / f"{part.name}.log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _end(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if status != "passed":
        print("\n".join(f"    {line}" for line in lines[-TAIL:]), flush=True)
        print(f"    (all of it: {log})", flush=True)
    return Outcome(part.name, status, time.monotonic() - start, lines[-1][:200] if lines else "it printed nothing")


def tests() -> list[str]:
    """The files that have tests for one GPU: others would only be collected, and fail where their packages are not."""
    found = (ROOT / "tests" / "engine").rglob("test_*.py")
    names = [str(path.relative_to(ROOT)) for path in found if MARK in path.read_text(encoding="utf-8")]
    return sorted(name for name in names if not name.startswith(RANKS))


def _end(process: subprocess.Popen) -> None:
    """Ends it and all that it started in its session: at a limit, at Ctrl-C, and what a part left behind."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()


if __name__ == "__main__":
    app()
