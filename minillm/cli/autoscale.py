"""`python -m minillm autoscale ROUTER` adds `serve` processes to a router as its load asks for, and takes them away.

    python -m minillm route --spawn 1 --port 8000
    python -m minillm autoscale http://127.0.0.1:8000 --most 4 --target 8

Options after `--` go to each `python -m minillm serve`. Its replicas end with it.
"""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option


def command(
    router: Annotated[str, Argument(help="Of `python -m minillm route`, such as http://127.0.0.1:8000.")],
    serve_options: Annotated[list[str] | None, Argument(metavar="-- OPTIONS", help="Of serve, for replicas.")] = None,
    least: Annotated[int, Option(help="Replicas, those that the router has already among them.", min=1)] = 1,
    most: Annotated[int, Option(help="Replicas.", min=1)] = 4,
    policy: Annotated[str, Option(help="reactive or predictive.")] = "reactive",
    target: Annotated[float, Option(help="Of reactive: open requests for each replica.", min=0.01)] = 8.0,
    capacity: Annotated[
        float | None, Option(help="Of predictive: requests per second that a replica serves.", min=0.001)
    ] = None,
    ahead: Annotated[float, Option(help="Of predictive: seconds to look ahead, a cold start and more.", min=0)] = 60.0,
    pool: Annotated[int, Option(help="Replicas kept warm that get no requests.", min=0, max=64)] = 0,
    interval: Annotated[float, Option(help="Seconds between decisions.", min=0.1)] = 15.0,
    cool_down: Annotated[float, Option(help="Seconds for which a replica has to be too many.", min=0)] = 300.0,
    seconds: Annotated[float | None, Option(help="End after so many.", min=0.1, show_default="never")] = None,
    admin_key: Annotated[str | None, Option(help="The router's key for /replicas.", envvar="MINILLM_ADMIN_KEY")] = None,
    api_key: Annotated[str | None, Option(help="The key of the replicas.", envvar="MINILLM_API_KEY")] = None,
    api_keys: Annotated[Path | None, Option(metavar="FILE", help="Keys of tenants, as serve reads them.")] = None,
) -> int:
    """Start and end replicas behind a router as its load asks for."""
    from minillm.cli.serve import check_installed

    check_installed("autoscale")
    from minillm.api.autoscale.controller import Controller, Scaling
    from minillm.api.autoscale.policies import Predictive, Reactive
    from minillm.api.autoscale.processes import ProcessFleet
    from minillm.api.limits import Keys
    from minillm.api.router.fleet import checked_url
    from minillm.api.router.processes import Processes

    scaling = Scaling(least, most, interval, cool_down)
    if policy not in ("reactive", "predictive"):
        raise ValueError(f"--policy {policy} is unknown: use reactive or predictive")
    if policy == "predictive" and capacity is None:
        raise ValueError("--policy predictive needs --capacity: requests per second that a replica serves (see load)")
    chosen = Reactive(target) if policy == "reactive" else Predictive(capacity, ahead_s=ahead)
    Keys.read(api_key, api_keys)  # refuses what the replicas would refuse
    processes = Processes(serve_options or [], key=api_key, keys_file=api_keys)
    fleet = ProcessFleet(checked_url(router), processes, pool=pool, key=admin_key, replica_key=api_key)

    def tell(sample, count: int) -> None:
        typer.echo(
            f"{sample.rate:.2f} requests/s, {sample.waiting} wait, {sample.running} run, {sample.ready} ready, "
            f"{sample.starting} starting: {count} wanted"
        )

    try:
        Controller(chosen, scaling).run(fleet, float("inf") if seconds is None else seconds, tell)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    except KeyboardInterrupt:
        pass
    finally:
        fleet.close()
        for each in fleet.starts:
            phases = ", ".join(f"{name} {took:.2f} s" for name, took in each.phases.items())
            typer.echo(f"{each.url} was ready after {each.seconds:.2f} s: {phases}")
    return 0
