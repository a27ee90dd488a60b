"""Files that others' machines run: each command in them is there, and versions are those of pyproject.toml."""

import json
import re
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow: Path) -> list[str]:
    """Each `run` of a workflow."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_and_says_what_it_may_do(workflow):
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 120
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    called = [name for command in commands(workflow) for name in re.findall(r"\bmake (\w+)", command)]
    assert called and set(called) <= TARGETS


def test_every_supported_python_is_tested():
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    lowest, beyond = (int(minor) for minor in re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    assert matrix["python"] == [f"3.{minor}" for minor in range(lowest, beyond)]


def test_the_container_is_set_up_by_the_makefile():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert re.match(r"make (\w+)", container["postCreateCommand"])[1] in TARGETS
    assert re.search(r"python:3\.1[12]$", container["image"])


def test_citation_and_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]["text"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == PROJECT["version"]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes" / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("version", ["1.27", "1.30"])  # the oldest that recipes and docs promise, and a later one
def test_kubernetes_would_take_a_recipe(recipe, version):
    for document in yaml.safe_load_all(recipe.read_text(encoding="utf-8")):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_a_form_asks_for_what_is_needed(form):
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        assert set(content) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= content.keys()
    for question in content["body"]:
        assert question["type"] in ("input", "textarea", "dropdown") and question["attributes"]["label"]
    names = [question["id"] for question in content["body"]]
    assert len(names) == len(set(names)) and any(question["validations"]["required"] for question in content["body"])


def test_the_cell_for_hosted_notebooks_installs_what_is_there():
    """Each of its commands: a folder that README clones into, an extra of pyproject.toml, a command of minillm."""
    (cell,) = re.findall(r"```text\n(!git clone .*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)
    assert "git clone REPOSITORY_URL minillm" in cell and "%cd minillm" in cell
    (extras,) = re.findall(r"pip install .*-e \.\[([\w,]+)\]", cell)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "!python -m minillm doctor" in cell
