"""The files to read for a mechanism of serving: they exist, are short enough together, and the package names them."""

from pathlib import Path

import pytest

import minillm.serve

ROOT = Path(minillm.serve.__file__).parent
PATHS = {  # mechanism -> (files below minillm/serve in reading order, lines at most)
    "request to token": (
        [
            "engine.py",
            "requests/params.py",
            "requests/request.py",
            "requests/table.py",
            "schedule/sequence.py",
            "schedule/scheduler.py",
            "schedule/blocks.py",
            "run/model_runner.py",
            "sample/next_tokens.py",
            "sample/reference.py",
        ],
        1_850,
    ),
    "prefix cache": (["schedule/blocks.py", "schedule/sequence.py"], 350),
    "sampler": (["sample/reference.py", "sample/batch.py", "sample/selection.py"], 480),
}


@pytest.mark.parametrize("mechanism", PATHS)
def test_a_reading_path_is_short_and_named(mechanism):
    files, most = PATHS[mechanism]
    lines = sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files)
    assert lines <= most, f"{mechanism}: {lines} lines in {len(files)} files, at most {most}"
    unnamed = [name for name in files if f"`{name}`" not in minillm.serve.__doc__]
    assert not unnamed, f"{mechanism}: the docstring of minillm.serve does not name {unnamed}"
