"""What every test shares, and what a plain `pytest` runs.

    pytest                     what `make test` runs: all but what is marked `full`
    pytest -m full             what `make full` runs
    pytest tests/engine        one room of the house; a file or a test that is named runs whole, in this process

Notebooks are tests, too: nbval executes them in a kernel, cell by cell, one notebook on one worker. A solution is
executed strictly, so that a check or a claim of it that does not hold fails its cell; a lab is executed as handed out.
"""

import fcntl
import json
import os
import random
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from minillm.comm.launch import forkserver

ROOT = Path(__file__).parent
# The notebooks of `make test`.
QUICK = {"labs": ("21",), "solutions": ("20",)}
# `make full` draws one in so many of the other notebooks (what a solution shows was made by this very code, or
# `notebooks --check` fails) and, of each folder's tests that are `full` and say nothing themselves, one in so many.
DRAWN = {"labs": 8, "solutions": 3, "tests": 3}
APART = ("tests/bench/", "tests/course/exercises/", "tests/engine/oracle/", "tests/browser/")

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine fails no example
torch.set_num_threads(1)  # on tiny tensors many times faster than several that contend for the cores


forkserver.PRELOAD += ["pytest", "hypothesis"]  # loaded once, not in every rank of these tests


def pytest_configure(config):
    """No test touches the progress of whoever runs it, all workers draw alike, and `full` tests run when asked for."""
    folder = tempfile.TemporaryDirectory(prefix="minillm-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["MINILLM_PROGRESS"] = str(Path(folder.name, "progress.json"))
    if "MINILLM_SEED" not in os.environ:
        os.environ["MINILLM_SEED"] = _seed(config)
    if not config.option.markexpr and not _names_a_file(config) and os.environ.get("MINILLM_PROOF") != "all":
        config.option.markexpr = "not full"


def _seed(config):
    """Drawn anew in each run; `--last-failed` draws again what failed."""
    seed = str(random.SystemRandom().randrange(10**9))
    if hasattr(config, "cache"):
        seed = config.cache.get("minillm/seed", seed) if config.option.lf else seed
        config.cache.set("minillm/seed", seed)
    return seed


def pytest_xdist_auto_num_workers(config):
    """A test may start four processes of its own. What is named runs in this process, where a debugger can be used."""
    return 0 if _names_a_file(config) else max(2, (os.cpu_count() or 1) // 4)


def _names_a_file(config):
    return any(Path(argument.partition("::")[0]).suffix for argument in config.args)


def pytest_xdist_make_scheduler(config, log):
    """A notebook or a file stays on one worker: it shares a kernel or fixtures. Long tests that share none go apart."""

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Most notebooks belong to `make full`, which draws of them and of its tests. Where a test or a module is marked
    `drawn(n)`, one in n of its cases is kept, of those that are `full` and of the others; with 1, all."""
    draws = {}  # (where, n): {what is drawn: its items}
    for item in items:
        if item.path.suffix == ".ipynb":
            folder = item.path.parent.name
            if item.path.name[:2] not in QUICK.get(folder, ()):
                item.add_marker(pytest.mark.full)
                draws.setdefault((folder, DRAWN.get(folder, 1)), {}).setdefault(str(item.path), []).append(item)
            continue
        full = bool(item.get_closest_marker("full"))
        for node, mark in item.iter_markers_with_node("drawn"):
            where = f"{node.nodeid.partition('[')[0]} {full}"
            draws.setdefault((where, *mark.args), {})[item.nodeid] = [item]
        if full and not item.get_closest_marker("drawn"):
            folder = str(item.path.parent.relative_to(config.rootpath))
            draws.setdefault((folder, DRAWN["tests"]), {})[item.nodeid] = [item]
    if os.environ.get("MINILLM_PROOF") == "all" or _names_a_file(config) or config.option.keyword:
        return  # whoever names tests, by file or with -k, gets all of them
    left_out = set()
    for (where, n), cases in draws.items():
        kept = random.Random(f"{os.environ['MINILLM_SEED']} {where}").sample(sorted(cases), -(-len(cases) // n))
        left_out |= {item for case in cases.keys() - set(kept) for item in cases[case]}
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """The first cell starts the kernel, which takes its environment from here."""
    if item.path.suffix != ".ipynb" or item.path.parent.name != "solutions":
        return (yield)
    with mock.patch.dict(os.environ, {"MINILLM_STRICT": "1"}):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session):
    """`--last-failed` tries a cell again with its whole notebook."""
    result = yield
    if hasattr(session.config, "cache") and not hasattr(session.config, "workerinput"):
        failed = set(session.config.cache.get("cache/lastfailed", {}))
        notebooks = {name.partition("::")[0] for name in failed if ".ipynb::" in name}
        root = session.config.rootpath
        cells = {f"{path}::Cell {number}" for path in notebooks for number in range(_code_cells(root / path))}
        session.config.cache.set("cache/lastfailed", dict.fromkeys(sorted(failed | cells), True))
    return result


def _code_cells(path):
    return sum(cell["cell_type"] == "code" for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Where tests run side by side, one marked `wire` waits for the others and they wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = Path(item.config.rootpath, ".pytest_cache")
    folder.mkdir(exist_ok=True)
    with (folder / "loopback.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("wire") else fcntl.LOCK_SH)
        return (yield)
