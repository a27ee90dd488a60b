"""Each mechanism is read in few files: they exist, are short together, and their package's docstring names them."""

import ast
from pathlib import Path

import pytest

import minillm

MODEL = Path(minillm.__file__).parent / "model"
PATHS = {  # mechanism: (package, files in reading order, most lines of all)
    "a forward pass": ("", ["config.py", "transformer.py", "initialise.py", "rope.py", "loss.py"], 900),
    "attention in tiles": ("attention", ["causal.py", "tiled.py", "tiled_triton.py"], 700),
    "paged attention": ("paged", ["cache.py", "tables.py", "backend.py", "gather.py", "loop.py"], 500),
    "paged attention on a GPU": ("paged", ["cache.py", "tables.py", "backend.py", "split.py", "triton.py"], 600),
    "loading a folder": ("hf", ["load.py", "families.py", "rope.py", "experts.py", "weights.py"], 770),
    "a mixture of experts": ("moe", ["layer.py", "router.py", "permute.py", "experts.py", "balance.py"], 700),
}


@pytest.mark.parametrize("mechanism", PATHS)
def test_a_mechanism_is_read_in_few_lines(mechanism):
    package, files, most = PATHS[mechanism]
    folder = MODEL / package
    listed = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert [file for file in files if file not in listed] == []
    assert sum(len((folder / file).read_text().splitlines()) for file in files) <= most


def test_no_file_is_long():
    lines = {str(path.relative_to(MODEL)): len(path.read_text().splitlines()) for path in MODEL.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > 330} == {}
