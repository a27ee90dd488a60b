"""Each mechanism is read in a few files: they exist, they are as short as promised, and the docstring names them."""

from pathlib import Path

import pytest

import minillm.parallel

ROOT = Path(minillm.parallel.__file__).parent
PATHS = {  # by subpackage: the files to read, and the lines that they may have together
    "fsdp": (["fully_shard.py", "param_group.py", "flat_param.py", "../slices.py", "state.py"], 1030),
    "zero": (["optimizer.py", "reducer.py", "../data_parallel/reducer.py", "../slices.py"], 650),
}


@pytest.mark.parametrize("folder", PATHS)
def test_a_mechanism_is_read_in_one_sitting(folder):
    names, most = PATHS[folder]
    files = [ROOT / folder / name for name in names]
    introduction = (ROOT / folder / "__init__.py").read_text()
    assert [name for name in names if f"`{name}`" not in introduction] == []
    assert sum(len(file.read_text().splitlines()) for file in files) <= most
