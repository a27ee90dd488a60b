"""`python -m minillm serve` answers OpenAI clients over HTTP; without arguments the committed model with its drafter.

    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"model": "target", "prompt": "def ", "max_tokens": 20}'

It listens on this machine only unless a key is given with --api-key or --api-keys. SIGTERM (or Ctrl-C) ends open
requests first.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from minillm.adapters.store import BUDGET_BYTES, MAX_ADAPTERS, AdapterStore
from minillm.cli.ranks import check_ranks, serve_on_ranks, start_deaf_server, under_torchrun
from minillm.comm import is_root
from minillm.model.generate import device_of, folder_of
from minillm.quantize.kv import KV_FORMATS
from minillm.serve.engine import LLM
from minillm.serve.load import DTYPES, engine_options
from minillm.serve.ranks.engine import signals_ignored
from minillm.serve.schedule.fair import FairScheduler, Share
from minillm.serve.speculate.registry import PROPOSERS, proposer_named

if TYPE_CHECKING:
    from fastapi import FastAPI

    from minillm.serve.transfer import PrefillPool

MODEL, LIMIT, SAFETY = (partial(Option, rich_help_panel=panel) for panel in ("Model", "Limits", "Safety"))
ORDERS = ("fair", "arrival")
NEEDED = ("fastapi", "httpx", "uvicorn", "prometheus_client")


def command(
    model: Annotated[
        str, MODEL(metavar="NAME|PATH", help="target, draft, or a Hugging Face folder (families: docs/models.md).")
    ] = "target",
    name: Annotated[
        str | None, MODEL(help="What clients call it.", show_default="the model's name or its folder's")
    ] = None,
    device: Annotated[str | None, MODEL(help="cpu, cuda, ...", show_default="a GPU if there is one")] = None,
    dtype: Annotated[
        str | None, MODEL(help=f"{', '.join(DTYPES)}.", show_default="float32 on the CPU, else the checkpoint's")
    ] = None,
    max_seq_len: Annotated[int | None, MODEL(help="Context to load the model for.", min=1)] = None,
    speculate: Annotated[
        str | None,
        MODEL(
            metavar="NAME",
            help=f"Drafts tokens: {', '.join(PROPOSERS)}, or none.",
            show_default="draft for target, else none",
        ),
    ] = None,
    k: Annotated[int, MODEL("--k", help="Draft tokens per pass.", min=1)] = 4,
    adapter: Annotated[
        list[str] | None,
        MODEL(metavar="NAME=DIR", help="A folder of peft's, served under its own name; give as many as you like."),
    ] = None,
    max_adapters: Annotated[int, MODEL(help="Different adapters in a step.", min=1)] = MAX_ADAPTERS,
    adapter_mb: Annotated[int, MODEL(help="MB for adapters on the device.", min=1)] = BUDGET_BYTES >> 20,
    kv: Annotated[str | None, MODEL(metavar="NAME", help=f"8-bit keys and values: {', '.join(KV_FORMATS)}.")] = None,
    int8_head: Annotated[bool, MODEL("--int8-head", help="Logits from an int8 copy of the head.")] = False,
    host: Annotated[str, SAFETY(help="Address to listen on; another than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, SAFETY(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, SAFETY(help="A key that every client has to send.", envvar="MINILLM_API_KEY")
    ] = None,
    api_keys: Annotated[Path | None, SAFETY(metavar="FILE", help='Keys of tenants: lines "tenant key".')] = None,
    max_body: Annotated[int, LIMIT(help="Bytes of a request.", min=1)] = 4 << 20,
    max_prompt: Annotated[int | None, LIMIT(help="Tokens of a prompt.", show_default="the model's", min=1)] = None,
    max_n: Annotated[int, LIMIT(help="Answers of a request.", min=1)] = 16,
    max_open: Annotated[int, LIMIT(help="Open requests of all tenants.", min=1)] = 1024,
    max_open_per_tenant: Annotated[int, LIMIT(help="Open requests of each tenant.", min=1)] = 1024,
    timeout: Annotated[float, LIMIT(help="Seconds from a request to its last token.", min=0.001)] = 600.0,
    max_num_seqs: Annotated[int | None, LIMIT(help="Sequences in a batch.", min=1)] = None,
    token_budget: Annotated[int | None, LIMIT(help="Tokens of a step.", min=1)] = None,
    order: Annotated[
        str, LIMIT(help="Who is next: fair (the tenant that had least, by weight) or arrival (first come).")
    ] = "fair",
    until_stdin_closes: Annotated[
        bool, SAFETY(help="Shut down when standard input closes, as it does when a parent process dies.")
    ] = False,
    tp: Annotated[int, MODEL(help="Ranks that share every layer; the first of them answers.", min=1)] = 1,
    pp: Annotated[int, MODEL(help="Stages that the layers are divided into, of --tp ranks each.", min=1)] = 1,
    ep: Annotated[
        bool,
        MODEL("--ep", help="With --tp: each rank has some of the experts, not a part of each."),
    ] = False,
    prefill: Annotated[
        int | None, MODEL(help="Ranks of their own that compute long prompts and hand keys and values over.", min=1)
    ] = None,
    decode: Annotated[int | None, MODEL(help="Beside --prefill: ranks that answer, as --tp.", min=1)] = None,
    prefill_least: Annotated[int, MODEL(help="Tokens of a prompt, not cached here, to hand it over.", min=1)] = 128,
) -> int:
    """Serve a model over HTTP to any OpenAI client."""
    check_installed("serve")
    from minillm.api.app import create_app
    from minillm.api.entry import is_loopback
    from minillm.api.limits import Keys, Limits, shares_of
    from minillm.api.run import bind, serve, url_of
    from minillm.measure.start import Start

    start = Start()
    start.end("imports")
    keys = Keys.read(api_key, api_keys)
    if not is_loopback(host) and not keys.secrets:
        raise ValueError(f"--host {host} is open to others: give a key with --api-key or --api-keys FILE")
    for option, value, known in (("dtype", dtype, DTYPES), ("kv", kv, KV_FORMATS), ("order", order, ORDERS)):
        if value is not None and value not in known:
            raise ValueError(f"--{option} {value} is unknown: use one of {', '.join(known)}")
    drafter = speculate or ("draft" if model == "target" else "none")
    if drafter not in (*PROPOSERS, "none"):
        raise ValueError(f"--speculate: no proposer {drafter!r}: use one of {', '.join(PROPOSERS)}, or none")
    folders = _folders(adapter or [])
    if order == "arrival" and any(share != Share() for share in shares_of(keys).values()):
        raise ValueError("--order arrival knows no tenants: leave weight= and running= out of --api-keys, or use fair")
    limits = Limits(max_body, max_prompt, max_n, max_open, max_open_per_tenant, timeout)
    if decode is not None and (prefill is None or tp > 1):
        raise ValueError(f"--decode {decode} stands beside --prefill N and in place of --tp: give --prefill, not --tp")
    tp = tp if decode is None else decode
    ranks = check_ranks(tp, pp, device, ep)
    if prefill is not None and pp > 1:
        raise ValueError(
            f"--prefill {prefill} with --pp {pp}: keys are handed over to ranks that have all layers, leave --pp out"
        )
    if ranks > 1 and int8_head:
        raise ValueError(f"--int8-head on {ranks} ranks: a head that is cut over ranks stays as it is, leave one out")
    engine = {"max_num_seqs": max_num_seqs, "token_budget": token_budget, "kv_dtype": kv}
    options = {key: value for key, value in engine.items() if value is not None}
    if order == "fair":
        options["scheduler"] = partial(FairScheduler, shares=shares_of(keys), clock=time.perf_counter)
    if folders:
        options["adapters"] = {"budget_bytes": adapter_mb << 20, "max_adapters": max_adapters, "folders": folders}
    where = {"dtype": None if dtype is None else DTYPES[dtype], "max_seq_len": max_seq_len}
    known = name or (Path(model).name if Path(model).is_dir() else model)
    if (ranks > 1 or prefill is not None) and not under_torchrun():
        start_deaf_server()
    listening = bind(host, port) if is_root() else None  # torchrun's other ranks have no port
    with listening or nullcontext(), _pool(prefill, prefill_least, model, device, where, options) as pool:
        if pool is not None:
            options["prefill"] = pool if ranks == 1 else pool.at
        address = url_of(host, listening) if listening else ""

        def announce() -> None:
            typer.echo(f"{known}: {address}/v1 for OpenAI's clients, {address}/ to try it in a browser", err=True)

        if ranks > 1:
            options |= {"pp": pp, "ep": ep}
            if "adapters" in options:
                options["adapters"] = partial(AdapterStore.beside, folder_of(model), **options["adapters"])
            options |= {} if drafter == "none" else {"proposer": drafter, "k": k}

            def app_of(llm: LLM) -> "FastAPI":  # on rank 0, which goes on with the time of this process
                start.end("load")
                return create_app({known: llm}, limits, keys, start)

            ends = {"until_stdin_closes": until_stdin_closes, "device": device}
            serve_on_ranks(ranks, folder_of(model), listening, app_of, announce, **ends, **where, **options)
            return 0
        where["device"] = None if device is None else device_of(device)
        where["int8_head"] = int8_head
        llm = _engine(model, drafter, k, where, options)
        start.end("load")
        announce()
        with nullcontext() if pool is None else signals_ignored():  # which uvicorn raises again, before the pool ends
            serve(create_app({known: llm}, limits, keys, start), listening, until_stdin_closes=until_stdin_closes)
    return 0


def _pool(
    ranks: int | None, least: int, model: str, device: str | None, where: dict, options: dict
) -> "AbstractContextManager[PrefillPool | None]":
    """Of so many ranks, with what its engine has in common with the one that decodes."""
    if ranks is None:
        return nullcontext()
    from minillm.serve.transfer import PrefillPool

    kind = None if device is None else device.partition(":")[0]
    alike = {key: options[key] for key in ("max_num_seqs", "token_budget", "kv_dtype") if key in options}
    return PrefillPool.spawn(folder_of(model), ranks, min_tokens=least, device=kind, **where, **alike)


def _engine(model: str, drafter: str, k: int, where: dict, options: dict) -> LLM:
    loaded = engine_options(model, **where)
    if drafter != "none":
        options |= {"proposer": proposer_named(drafter, loaded["model"]), "k": k}
    if adapters := options.pop("adapters", None):
        options["adapters"] = AdapterStore.beside(folder_of(model), loaded["model"], **adapters)
    return LLM(**loaded | options)


def _folders(given: list[str]) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for each in given:
        name, _, folder = each.partition("=")
        if not name or not folder:
            raise ValueError(f"--adapter {each} must be NAME=DIR, the name that clients ask for and a folder of peft's")
        if name in folders:
            raise ValueError(f"--adapter {name} is given twice: each needs a name of its own")
        folders[name] = Path(folder)
    return folders


def check_installed(command: str) -> None:
    """ValueError if a package of the extra `serve` is missing."""
    if missing := [each for each in NEEDED if find_spec(each) is None]:
        raise ValueError(f"{command} needs {', '.join(missing)}: pip install 'minillm[serve]', or requirements.txt")
