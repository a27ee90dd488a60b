"""What monitors and scales the server in a cluster speaks of metrics, labels, paths and times that the server has."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.engine.api.running import engine

from minillm.api.entry import OPEN_PATHS  # isort: skip
from minillm.api.metrics import Metrics
from minillm.api.router.metrics import RouterMetrics
from minillm.api.run import DRAIN_S
from minillm.cli import serve

RECIPES = Path(__file__).parents[3] / "recipes"
MADE_BY_SCRAPING = {"namespace", "pod", "le"}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Labels by the name of each series that server and router expose."""
    found: dict[str, set[str]] = {}
    for registry in (Metrics({"draft": engine()}).registry, RouterMetrics().registry):
        for metric in registry._collector_to_names:
            for family in metric.collect():
                suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
                labels = getattr(metric, "_labelnames", None) or getattr(family, "_labelnames", ())
                found |= {family.name + suffix: set(labels) for suffix in suffixes}
    return found


def named(text: str) -> set[str]:
    return set(re.findall(r"\bminillm_\w+", text))


def labels_of(query: str) -> set[str]:
    grouped = [each for group in re.findall(r"\bby \(([^)<]*)\)", query) for each in group.split(",")]
    return {each.strip() for each in [*grouped, *re.findall(r"(\w+)(?:=|!=|=~)\"", query)] if each.strip()}


def queries() -> list[str]:
    panels = json.loads((RECIPES / "grafana/fleet.json").read_text())["panels"]
    (rule,) = yaml.safe_load((RECIPES / "prometheus/adapter.yaml").read_text())["rules"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["seriesQuery"]]


@pytest.mark.parametrize("query", queries())
def test_a_query_reads_series_and_labels_that_there_are(exposed, query):
    series = named(query)
    assert series and series <= exposed.keys(), series - exposed.keys()
    known = set.union(*(exposed[each] for each in series))
    assert labels_of(query) <= known | MADE_BY_SCRAPING
    assert query.count("(") == query.count(")")


def test_every_panel_shows_something_of_its_own_and_the_dashboard_forgets_no_metric(exposed):
    board = json.loads((RECIPES / "grafana/fleet.json").read_text())
    titles = [panel["title"] for panel in board["panels"]]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(set(titles)) == len(titles) == len(places)
    counters = {name for name in exposed if name.endswith("_total")}
    shown = set.union(*map(named, queries()))
    assert counters - shown == {"minillm_router_requests_total"}  # the replicas' own are shown


def test_the_cluster_asks_for_paths_and_waits_as_long_as_the_server_does(exposed):
    documents = {each["kind"]: each for each in yaml.safe_load_all((RECIPES / "kubernetes/serve.yaml").read_text())}
    pod = documents["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert [probe["path"] for probe in probes] == ["/ready", "/ready", "/health"]
    assert {probe["path"] for probe in probes} <= set(OPEN_PATHS), "a probe has no key"
    (port,) = container["ports"]
    assert all(probe["port"] == port["name"] for probe in probes)
    assert f"--port={port['containerPort']}" in container["args"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + DRAIN_S
    scaled = documents["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == documents["Deployment"]["metadata"]["name"]
    assert scaled["metrics"][0]["pods"]["metric"]["name"] in exposed
    labels = pod["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == labels
    assert documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert documents["Deployment"]["spec"]["selector"]["matchLabels"] == labels


def test_the_command_of_the_pod_is_one_that_serve_takes():
    from minillm.__main__ import parser_of

    documents = {each["kind"]: each for each in yaml.safe_load_all((RECIPES / "kubernetes/serve.yaml").read_text())}
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "minillm", "serve"] and serve.command
    given = parser_of("serve").make_context("serve", list(container["args"])).params
    assert (given["host"], given["port"]) == ("0.0.0.0", 8000)
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert all(any(given[name] and str(given[name]).startswith(at) for at in mounts) for name in ("model", "api_keys"))
