"""`python -m minillm route` puts several servers behind one address: replicas that run already, or that it spawns.

    python -m minillm route --spawn 2 --policy prefix-affinity -- --model FOLDER

Options after `--` go to each spawned `python -m minillm serve`. It listens on this machine only unless a key is given
with --api-key or --api-keys. SIGTERM (or Ctrl-C) ends open requests first, then the replicas it spawned.
"""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

REPLICAS, POLICY, SAFETY = (partial(Option, rich_help_panel=panel) for panel in ("Replicas", "Policy", "Safety"))


def command(
    serve_options: Annotated[
        list[str] | None, Argument(metavar="-- OPTIONS", help="Of serve, for the replicas of --spawn.")
    ] = None,
    replicas: Annotated[str | None, REPLICAS(metavar="URL,URL", help="Servers that run already.")] = None,
    spawn: Annotated[
        int | None, REPLICAS(help="Start so many here, which end with the router.", min=1, max=256)
    ] = None,
    check: Annotated[float, REPLICAS(help="Seconds between checks of a replica.", min=0.01)] = 1.0,
    check_path: Annotated[str, REPLICAS(help="What answers 200 if a replica takes requests.")] = "/ready",
    policy: Annotated[
        str, POLICY(help="round-robin, least-outstanding, two-choices or prefix-affinity.")
    ] = "two-choices",
    load_bound: Annotated[float, POLICY(help="Of prefix-affinity: most load, times the mean.", min=1)] = 1.25,
    prefix: Annotated[int, POLICY(help="Of prefix-affinity: characters that have to agree.", min=1)] = 256,
    attempts: Annotated[int, POLICY(help="Replicas a request may try before its first token.", min=1)] = 3,
    retry_share: Annotated[float, POLICY(help="Retries per request, in the long run.", min=0, max=1)] = 0.2,
    host: Annotated[str, SAFETY(help="Address to listen on; another than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, SAFETY(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, SAFETY(help="A key that every client has to send.", envvar="MINILLM_API_KEY")
    ] = None,
    api_keys: Annotated[Path | None, SAFETY(metavar="FILE", help="Keys of tenants, as serve reads them.")] = None,
    admin_key: Annotated[
        str | None, SAFETY(help="The key for /replicas, where there are keys.", envvar="MINILLM_ADMIN_KEY")
    ] = None,
    max_body: Annotated[int, SAFETY(help="Bytes of a request.", min=1)] = 4 << 20,
    max_open: Annotated[int, SAFETY(help="Open requests of all tenants.", min=1)] = 1024,
    max_open_per_tenant: Annotated[int, SAFETY(help="Open requests of each tenant.", min=1)] = 1024,
    timeout: Annotated[float, SAFETY(help="Seconds from a request to its last token.", min=0.001)] = 600.0,
) -> int:
    """Put several servers behind one address."""
    from minillm.cli.serve import check_installed

    check_installed("route")
    from minillm.api.entry import is_loopback
    from minillm.api.limits import OPERATOR, Keys, Limits
    from minillm.api.router.app import RouterOptions, create_router
    from minillm.api.router.fleet import checked_url
    from minillm.api.router.processes import Processes
    from minillm.api.router.spawned import Spawned
    from minillm.api.run import bind, serve, url_of

    options = RouterOptions(policy, load_bound, prefix, attempts, retry_share, check_s=check, check_path=check_path)
    keys = Keys.read(api_key, api_keys)
    if not is_loopback(host) and not keys.secrets:
        raise ValueError(f"--host {host} is open to others: give a key with --api-key or --api-keys FILE")
    if admin_key is not None and not keys.secrets:
        raise ValueError("--admin-key is for a router whose clients have keys: give --api-key or --api-keys, too")
    if admin_key is not None:
        keys = keys.with_tenant(OPERATOR, admin_key, "--admin-key")
    if (replicas is None) == (spawn is None):
        raise ValueError("give either --replicas URL,URL or --spawn N")
    urls = [checked_url(each.strip()) for each in (replicas or "").split(",")] if replicas is not None else []
    if len(set(urls)) < len(urls):
        raise ValueError(f"--replicas {replicas} names a server twice: write each once")
    given = serve_options or []
    if spawn is None and given:
        raise ValueError(f"{' '.join(given)}: options of serve are only for --spawn")
    threads = max(1, (os.cpu_count() or 1) // (spawn or 1))
    processes = Processes(given, key=api_key, keys_file=api_keys, threads=threads)
    limits = Limits(body_bytes=max_body, open_requests=max_open, per_tenant=max_open_per_tenant, timeout_s=timeout)
    wrong: list[str] = []
    own_replicas = None if spawn is None else lambda fleet: Spawned(fleet, processes, spawn, on_failure=wrong.append)
    app = create_router(urls, options, limits, keys, own_replicas)
    listening = bind(host, port)
    try:
        typer.echo(f"router: {url_of(host, listening)}/v1 for OpenAI's clients", err=True)
        serve(app, listening, is_over=lambda: bool(wrong))
    finally:
        listening.close()
    if wrong:
        raise ValueError(wrong[0])
    return 0
