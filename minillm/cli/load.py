"""`python -m minillm load URL`: requests at given rates to a server, and what their callers got.

    python -m minillm load http://127.0.0.1:8000 --rate 4,8,16 --lengths 64:32 --figure load.png

Each request is sent when it is due, however slow the server is, and its latency counts from then.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from minillm.measure.provenance import JsonFile, provenance, writable, write_json

COLUMNS = (
    "requests/s  answered  TTFT p50   p90     p99  TPOT p50   p90     p99  end to end p50   p90     p99  goodput/s  "
    "good"
)


def command(
    url: Annotated[str, typer.Argument(help="Of the server, such as http://127.0.0.1:8000.")],
    rate: Annotated[
        str | None, Option(help="Requests per second, or several: 4,8,16.", show_default="4, or the trace's own")
    ] = None,
    requests: Annotated[int, Option(help="At each rate.", min=2, max=1_000_000)] = 100,
    lengths: Annotated[str, Option(metavar="PROMPT:ANSWER", help="Tokens, or ranges: 16-128:8-64.")] = "64:32",
    cv: Annotated[
        float, Option("--cv", help="Spread of the gaps: 1 = Poisson, 0 = even, 4 = bursts.", min=0.0, max=100.0)
    ] = 1.0,
    trace: Annotated[
        Path | None,
        Option(metavar="FILE", help='Replay JSON lines {"at", "prompt_tokens", "answer_tokens"}, also tenant, group.'),
    ] = None,
    prefix: Annotated[int, Option(help="Tokens that the prompts of a group share.", min=0, max=1_000_000)] = 0,
    groups: Annotated[int, Option(help="Prefix groups.", min=1, max=1_000_000)] = 1,
    tenants: Annotated[
        Path | None, Option(metavar="FILE", help='Keys of tenants: lines "tenant key", as for serve --api-keys.')
    ] = None,
    api_key: Annotated[str | None, Option(help="A key for all requests.", envvar="MINILLM_API_KEY")] = None,
    shares: Annotated[
        str | None, Option(metavar="NAME=SHARE,...", help="Of the tenants, as ada=10,alan=1.", show_default="equal")
    ] = None,
    model: Annotated[str | None, Option(help="By its name there.", show_default="the first that it lists")] = None,
    vocab: Annotated[int, Option(help="Prompts are random token ids below this.", min=1, max=1_000_000)] = 256,
    slo_ttft: Annotated[float, Option(help="Seconds to the first token of a good answer.", min=1e-6)] = 1.0,
    slo_tpot: Annotated[float, Option(help="Seconds per further token of a good answer.", min=1e-6)] = 0.1,
    timeout: Annotated[float, Option(help="Seconds after which a request is given up.", min=0.001)] = 120.0,
    seed: Annotated[int, Option(help="Of arrivals, lengths and prompts.", min=0)] = 0,
    picture: Annotated[
        Path | None, Option("--figure", metavar="FILE", callback=writable, help="Latency against rate (png).")
    ] = None,
    json_file: JsonFile = None,
) -> int:
    """Load a server at given rates; percentiles, goodput and errors. Exit status 1 if no request was answered."""
    from minillm.cli.serve import check_installed

    check_installed("load")
    from minillm.api.limits import Keys
    from minillm.api.load.plan import Lengths, Plan, replayed
    from minillm.api.load.report import Limit, by_tenant, latency_figure, report
    from minillm.api.router.fleet import checked_url
    from minillm.bench.arrival_times import read_trace

    url = checked_url(url)
    keys = Keys.read(api_key, tenants).secrets
    named = [name for name in keys if name != "default"]
    rates = _rates(rate)
    if trace is not None:
        lines = read_trace(trace)
        loads = [replayed(lines, each, vocab_size=vocab, seed=seed) for each in rates or [None]]
        if unknown := {line.tenant for line in lines} - {"", *keys}:
            raise ValueError(f"{trace} has the tenant {min(unknown)!r}: give its key with --tenants FILE")
    else:
        of_tenants = _shares(shares, named)
        plan = Plan(requests, Lengths.parse(lengths), cv, prefix, groups, of_tenants, vocab, seed)
        loads = [plan.at(each) for each in rates or [4.0]]
    if "default" in keys:
        keys |= {"": keys["default"]}
    limit, rows, reports = Limit(slo_ttft, slo_tpot), [], []
    typer.echo(COLUMNS)
    for coming in loads:
        calls = asyncio.run(_load(url, coming, model, keys, timeout))
        found = report(calls, limit)
        reports.append(found)
        typer.echo(_line(found))
        for kind, count in sorted(found.errors.items()):
            typer.echo(f"    {count} of {found.requests} failed: {kind}")
        if found.late.p99 > 0.1 * found.ttft.p50:
            typer.echo(f"    this generator sent its requests up to {found.late.p99:.3f} s late (p99): it is the limit")
        tenants_found = by_tenant(calls, limit)
        if len(tenants_found) > 1:
            for name, each in tenants_found.items():
                typer.echo(f"{_line(each)}  {name}")
        rows.append(found.to_json() | {"tenants": {name: each.to_json() for name, each in tenants_found.items()}})
    if picture:
        latency_figure(reports, limit).savefig(picture)
    write_json(json_file, {"provenance": provenance(), "rows": rows})
    return 0 if any(each.answered for each in reports) else 1


async def _load(url: str, coming: list, model: str | None, keys: dict[str, str], timeout: float) -> list:
    from minillm.api.load.drive import open_loop
    from minillm.api.load.send import OverHttp, http_client, model_of

    async with http_client(url) as client:
        known = await model_of(client, next(iter(keys.values()), None))
        return await open_loop(coming, OverHttp(client, model or known, keys, timeout))


def _line(found: Any) -> str:
    def three(each: Any) -> str:
        return f"{each.p50:>8.3f}{each.p90:>8.3f}{each.p99:>8.3f}"

    answered = f"{found.answered:>4} of {found.requests:<4}"
    times = f"{three(found.ttft)}  {three(found.tpot)}        {three(found.end_to_end)}"
    return f"{found.rate:>10.2f} {answered}{times}  {found.goodput:>9.2f}  {found.good:>4.0%}"


def _rates(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        found = [float(part) for part in text.split(",")]
        if not all(0 < each < float("inf") for each in found):
            raise ValueError
    except ValueError:
        raise ValueError(f"--rate {text}: write requests per second above 0, as 8 or 4,8,16") from None
    return found


def _shares(text: str | None, named: list[str]) -> dict[str, float]:
    """Of each tenant that has a key."""
    if text is None:
        return dict.fromkeys(named, 1.0)
    found = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            found[name] = float(share)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < float("inf"):
            raise ValueError(f"--shares {text}: write NAME=SHARE with a share above 0, as ada=10,alan=1")
        if name not in named:
            raise ValueError(f"--shares {text}: there is no key of {name!r}: give one with --tenants FILE")
    return found
