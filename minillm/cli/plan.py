"""`python -m minillm plan`: the layouts that train or serve a model on a cluster, ranked by arithmetic.

python -m minillm plan --model llama-3-70b --cluster h100 --gpus 64 --seq 8192 --batch 512
python -m minillm plan --model llama-3-70b --gpus 16 --serve --prompt 2000 --output 500 --tpot-ms 50 --rate 5
python -m minillm plan --this-machine --json planner.json
python -m minillm plan --placement --json placement.json
"""

import sys
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

from typer import Option

from minillm.measure.provenance import JsonFile, provenance, summary, write_json
from minillm.predict.planner import architectures, clusters, pools, published, published_memory, search, serving
from minillm.predict.planner.clusters import GIB
from minillm.predict.planner.layout import show_flattened, show_mesh

MODEL, CLUSTER, TRAINING, SERVING, OUTPUT, INSTEAD = (
    partial(Option, rich_help_panel=panel)
    for panel in ("Model", "Cluster", "Training", "Serving", "Output", "Instead of a plan")
)
MODEL_USUAL, CLUSTER_USUAL, GPUS_USUAL = "llama-3-8b", "h100", 8
RANKS = (2, 4, 8)  # of the layouts that are checked on this machine


def command(
    model: Annotated[
        str, MODEL(help=f"{', '.join(architectures.ARCHITECTURES)}, or a folder with a config.json.")
    ] = MODEL_USUAL,
    cluster: Annotated[str, CLUSTER(help=f"Devices: {', '.join(clusters.DEVICES)}.")] = CLUSTER_USUAL,
    gpus: Annotated[int, CLUSTER(help="Number of GPUs.")] = GPUS_USUAL,
    per_node: Annotated[int, CLUSTER(help="GPUs that share a node.")] = 8,
    network: Annotated[
        float | None, CLUSTER(help="GB/s of one GPU to other nodes, one direction.", show_default="the device's")
    ] = None,
    memory: Annotated[float | None, CLUSTER(help="GiB of one GPU.", show_default="the device's")] = None,
    seq: Annotated[int, TRAINING(help="Tokens of a sequence.")] = 8192,
    batch: Annotated[int, TRAINING(help="Sequences of one step.")] = 128,
    serve: Annotated[bool, SERVING("--serve", help="Plan serving instead of training.")] = False,
    prompt: Annotated[int, SERVING(help="Tokens of a prompt, with --serve.")] = 1000,
    output: Annotated[int, SERVING(help="Tokens of an answer, with --serve.")] = 300,
    tpot_ms: Annotated[
        float | None, SERVING(help="Most milliseconds per output token, with --serve.", show_default="any")
    ] = None,
    ttft_ms: Annotated[
        float | None, SERVING(help="Most milliseconds to the first token, with --serve.", show_default="any")
    ] = None,
    rate: Annotated[
        float | None,
        SERVING(help="Requests per second, with --serve: divide the GPUs for it.", show_default="as many as possible"),
    ] = None,
    mesh: Annotated[bool, OUTPUT("--show-mesh", help="Also say which ranks talk to which over which link.")] = False,
    check: Annotated[bool, INSTEAD("--published", help="Compare the planner with published runs instead.")] = False,
    here: Annotated[
        bool, INSTEAD("--this-machine", help="Predict layouts of 2, 4 and 8 CPU ranks on emulated links, and run them.")
    ] = False,
    placement: Annotated[
        bool, INSTEAD("--placement", help="Run layouts with the best and the worst order of axes on 2 and 4 nodes.")
    ] = False,
    top: Annotated[int, OUTPUT(help="Layouts to show.")] = 8,
    json_file: JsonFile = None,
) -> int:
    """Rank all layouts of a model on a cluster: memory and time by cause, and why each runner-up is slower."""
    counts = {"gpus": gpus, "per-node": per_node, "seq": seq, "batch": batch, "prompt": prompt, "output": output}
    for option, count in counts.items():
        if count < 1:
            raise ValueError(f"--{option} {count} must be at least 1.")
    if top < 1:
        raise ValueError(f"--top {top}: show at least 1 layout.")
    for option, most in {
        "network": network,
        "memory": memory,
        "tpot-ms": tpot_ms,
        "ttft-ms": ttft_ms,
        "rate": rate,
    }.items():
        if most is not None and most <= 0:
            raise ValueError(f"--{option} {most} must be above 0.")
    for option, instead in {"published": check, "this-machine": here, "placement": placement}.items():
        if instead and (model, cluster, gpus, serve) != (MODEL_USUAL, CLUSTER_USUAL, GPUS_USUAL, False):
            raise ValueError(
                f"--{option} has its own models and clusters: leave out --model, --cluster, --gpus, --serve."
            )
    if check:
        return _published(json_file)
    if here:
        return _checked(json_file)
    if placement:
        return _placed(json_file)
    shape, machine = _architecture(model), _cluster(cluster, gpus, per_node, network, memory)
    print(f"{shape.name}: {shape.parameters / 1e9:.1f} billion parameters, {shape.active_parameters / 1e9:.1f} active")
    print(f"{machine.gpus} x {machine.device.name} in {machine.nodes} node{'s' if machine.nodes > 1 else ''}\n")
    if serve:
        limits = {"tpot": tpot_ms and tpot_ms / 1e3, "ttft": ttft_ms and ttft_ms / 1e3}
        rows = _serving(shape, machine, prompt, output, limits, top)
        rows += _divided(shape, machine, prompt, output, rate, limits, top)
    else:
        rows = _training(shape, machine, seq, batch, top, mesh)
    write_json(json_file, {"provenance": provenance(), "rows": rows})
    return 0


def _architecture(name: str) -> architectures.Architecture:
    folder = Path(name)
    if name not in architectures.ARCHITECTURES and folder.exists():
        from minillm.model.hf.load import read_config  # needs torch, which the arithmetic does not

        return architectures.from_shape(folder.name, read_config(folder if folder.is_dir() else folder.parent))
    return architectures.architecture(name)


def _cluster(name: str, gpus: int, per_node: int, network: float | None, memory: float | None) -> clusters.Cluster:
    for option, value in (("--network", network), ("--memory", memory)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{option} {value} must be above 0 and finite.")
    machine = clusters.cluster(name, gpus, per_node=per_node)
    if network is not None:
        machine = replace(machine, network=network * 1e9)
    if memory is not None:
        machine = replace(machine, device=replace(machine.device, memory=memory * GIB))
    if machine.usable <= 0:
        raise ValueError(f"--memory {memory} GiB is less than what the context and the libraries take: give more.")
    return machine


def _training(shape, machine: clusters.Cluster, seq: int, batch: int, top: int, mesh: bool) -> list[dict]:
    ranking = search.rank(shape, machine, seq, batch, keep=top)
    best = ranking.best
    print(f"{ranking.tried} layouts of {batch} x {seq:,} tokens; the best that fit:\n")
    width = max(len(str(plan.layout)) for plan in ranking.plans)
    print(f"    {'layout':<{width}}  {'s/step':>8}  {'MFU':>5}  {'GiB':>5}  slower because")
    for place, plan in enumerate(ranking.plans, 1):
        why = "" if plan is best else search.explain(best, plan)
        numbers = f"{plan.step.seconds:>8.3g}  {plan.mfu:>5.1%}  {plan.memory.total / GIB:>5.1f}"
        print(f"{place:>2}  {plan.layout!s:<{width}}  {numbers}  {why}")
    each = best.tokens_per_s / machine.gpus
    print(f"\nThe first: {best.tokens_per_s:,.0f} tokens/s, {each:,.0f} per GPU")
    print("  seconds  " + ", ".join(f"{name} {value:.3g}" for name, value in asdict(best.step).items() if value))
    held = ", ".join(f"{name} {value / GIB:.1f}" for name, value in asdict(best.memory).items())
    print(f"  GiB      {held}; {machine.usable / GIB:.1f} usable")
    print(f"  error    of {_errors(fitted=False)} (--published)")
    if mesh:
        _show([*show_mesh(machine, best.layout), *show_flattened(machine, best.layout)])
    return [
        {
            "layout": str(plan.layout),
            **asdict(plan.layout),
            "seconds": plan.step.seconds,
            "step": asdict(plan.step),
            "memory": asdict(plan.memory),
            "mfu": plan.mfu,
            "tokens_per_s": plan.tokens_per_s,
        }
        for plan in ranking.plans
    ]


def _serving(shape, machine: clusters.Cluster, prompt: int, output: int, limits: dict, top: int) -> list[dict]:
    plans = serving.rank_serving(shape, machine, prompt, output, **limits, keep=top)
    print(f"prompts of {prompt:,}, answers of {output:,} tokens; most tokens/s first:\n")
    print("tp  pp  replicas  sequences  weights GiB  cache GiB  TTFT ms  TPOT ms  wire KB/token   tokens/s  per GPU")
    for plan in plans:
        print(
            f"{plan.tp:>2}  {plan.pp:>2}  {plan.replicas:>8}  {plan.sequences:>9}  {plan.weights / GIB:>11.1f}  "
            f"{plan.cache / GIB:>9.1f}  {plan.ttft * 1e3:>7.0f}  {plan.tpot * 1e3:>7.1f}  {plan.wire / 1e3:>13,.0f}  "
            f"{plan.tokens_per_s:>9,.0f}  {plan.tokens_per_s_per_gpu:>7,.0f}"
        )
    return [asdict(plan) for plan in plans]


def _divided(shape, machine: clusters.Cluster, prompt: int, output: int, rate, limits: dict, top: int) -> list[dict]:
    """Prefill and decode on GPUs of their own, beside all of them doing both."""
    try:
        plans = pools.rank_pools(shape, machine, prompt, output, rate=rate, **limits, keep=top)
    except ValueError as error:
        if rate is not None:
            raise
        print(f"\nprefill and decode on GPUs of their own: {error}")
        return []
    order = "most requests/s" if rate is None else f"shortest answers at {rate:g} requests/s"
    print(f"\nprefill and decode on GPUs of their own, and together; {order} first:\n")
    print("prefill         decode          GPUs  requests/s  TTFT ms  hand-over ms  TPOT ms  longest gap ms")
    for plan in plans:
        one = f"{plan.prefill} x tp {plan.prefill_tp} pp {plan.prefill_pp}" if plan.split else "together"
        other = f"{plan.decode} x tp {plan.decode_tp} pp {plan.decode_pp}"
        print(
            f"{one:<14}  {other:<14}  {plan.cards:>4}  {plan.rate:>10.2f}  {plan.ttft * 1e3:>7.0f}  "
            f"{plan.handover * 1e3:>12.1f}  {plan.tpot * 1e3:>7.1f}  {plan.gap * 1e3:>14.1f}"
        )
    return [asdict(plan) for plan in plans]


def _show(rows: list[dict]) -> None:
    head = "group            size  stride  groups  link             GB/s"
    print(f"\n{head}  {'what travels':<37}  first group")
    for row in rows:
        first = ", ".join(map(str, row["first_group"][:4])) + (", ..." if row["size"] > 4 else "")
        rate = f"{row['bytes_per_s'] / 1e9:>6.0f}" if row["bytes_per_s"] else "     -"
        sizes = f"{row['axis']:<15}  {row['size']:>4}  {row['stride']:>6}  {row['groups']:>6}"
        use = row["use"] if row["size"] > 1 else "-"
        print(f"{sizes}  {row['link']:<13}  {rate}  {use:<37}  {first}")


def _published(json_file: Path | None) -> int:
    rows, notes = [published.compare(run) for run in published.RUNS], []
    held = [published_memory.compare(peak) for peak in published_memory.PEAKS]
    width = max(len(row.run) for row in (*rows, *held))
    print(f"{'run':<{width}}  reported  predicted     off    GiB  of")
    for row in rows:
        if row.note and row.note not in notes:
            notes.append(row.note)
        marks = ["fitted"] if row.fitted else []
        marks += [f"note {notes.index(row.note) + 1}"] if row.note else []
        full = f"{row.memory / GIB:>5.1f}  {row.usable / GIB:.1f}"
        numbers = f"{row.reported:>8.1%}  {row.predicted:>9.1%}  {row.off:>+6.1%}  {full}"
        print(f"{row.run:<{width}}  {numbers}  {', '.join(marks)}".rstrip())
    print(f"\n{'peak memory of the fullest GPU, in GiB':<{width}}  reported  predicted     off")
    for peak in held:
        if peak.note and peak.note not in notes:
            notes.append(peak.note)
        mark = f"note {notes.index(peak.note) + 1}" if peak.note else ""
        numbers = f"{peak.reported / GIB:>8.1f}  {peak.predicted / GIB:>9.1f}  {peak.off:>+6.1%}"
        print(f"{peak.run:<{width}}  {numbers}  {mark}".rstrip())
    print("", *(f"note {number}: {note}" for number, note in enumerate(notes, 1)), "", sep="\n")
    for name, fitted in (("fitted", True), ("not fitted", False)):
        print(f"{name}: {_errors(fitted)}")
    near = sum(abs(peak.off) <= published_memory.NEAR for peak in held)
    print(f"memory: {near} of {len(held)} within {published_memory.NEAR:.0%}; none of them was fitted")
    numbers = {"rows": [{**asdict(row), "off": row.off} for row in rows]}
    numbers["memory"] = [{**asdict(peak), "off": peak.off} for peak in held]
    write_json(json_file, {"provenance": provenance(), **numbers})
    return 0


def _errors(fitted: bool) -> str:
    off = published.errors(fitted)
    most, worst = off[len(off) * 9 // 10], off[-1]
    return f"{len(off)} published runs, half within {median(off):.1%}, nine in ten within {most:.1%}, worst {worst:.1%}"


def _checked(json_file: Path | None) -> int:
    """Exit status 1 if bytes or memory are off, which no other work on the machine can excuse."""
    from minillm.equivalence.planner import EXPERTS, MEMORY, MODEL, TIME, best_of, compare, expert_layouts, layouts

    origin = provenance()
    print(summary(origin), "", "two emulated nodes of half the ranks", sep="\n")
    print(f"{'':<62}  predicted s  measured s     off  bytes   peak MB     off")
    rows = []
    for ranks, model in product(RANKS, (MODEL, EXPERTS)):
        chosen, what = (expert_layouts(ranks), "experts on ") if model.moe else (layouts(ranks), "")
        _tell(f"running {len(chosen)} layouts of {what}{ranks} ranks")
        found = compare(ranks, ranks // 2, chosen, model=model)
        for row in found:
            time = f"{row.seconds:>11.3f}  {row.measured_seconds:>10.3f}  {row.late:>+6.1%}"
            exact = "exact" if row.exact else "OFF"
            print(f"{row.layout:<62}  {time}  {exact:<5}  {row.measured_peak / 1e6:>7.2f}  {row.full:>+6.1%}")
        best = f"the layout predicted to be the fastest is number {best_of(found)} of {len(found)}"
        print(f"{what}{ranks} ranks: {best}\n", flush=True)
        rows += found
    late = sum(abs(row.late) <= TIME for row in rows)
    exact, full = sum(row.exact for row in rows), sum(abs(row.full) <= MEMORY for row in rows)
    print(f"{len(rows)} layouts: time within {TIME:.0%} for {late}, bytes exact for {exact}, ", end="")
    print(f"peak memory within {MEMORY:.0%} for {full}")
    named = [{**asdict(row), "time_off": row.late, "exact": row.exact, "peak_off": row.full} for row in rows]
    write_json(json_file, {"provenance": origin, "rows": named})
    return 0 if exact == full == len(rows) else 1


def _placed(json_file: Path | None) -> int:
    from minillm.equivalence.placement import compare

    origin, rows = provenance(), []
    print(summary(origin), "", "orders of axes, innermost first; seconds of a step on emulated links", sep="\n")
    for row in compare(RANKS[-1], [RANKS[-1] // nodes for nodes in (2, 4)], tell=_tell):
        print(f"\n{row.layout}, {row.nodes} nodes")
        for name, order in row.orders.items():
            measured = (
                f"{row.measured_seconds[name]:.3f}" if name in row.measured_seconds else "not run: as long as the best"
            )
            print(f"  {name:<10}  {' '.join(order)}  predicted {row.seconds[name]:.3f}  measured {measured}")
        measured = f", measured {row.measured_ratio:.2f}" if row.measured_ratio else ""
        print(f"  worst / best: predicted {row.ratio:.2f}{measured}", flush=True)
        rows.append({**asdict(row), "ratio": row.ratio, "measured_ratio": row.measured_ratio})
    write_json(json_file, {"provenance": origin, "rows": rows})
    return 0


def _tell(line: str) -> None:
    """Says on stderr what runs now."""
    print(line, file=sys.stderr, flush=True)
