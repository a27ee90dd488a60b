"""Each mechanism is read in few files: they exist, are short together, and their package's docstring names them."""

import ast
from pathlib import Path

import pytest

import minillm

HERE = Path(minillm.__file__).parent
PATHS = {  # mechanism: (package, files in reading order, most lines of all)
    "a forward pass": ("model", "config transformer initialise rope loss", 900),
    "attention in tiles": ("model/attention", "causal tiled tiled_triton", 700),
    "paged attention": ("model/paged", "cache tables backend gather loop", 500),
    "paged attention on a GPU": ("model/paged", "cache tables backend split triton", 600),
    "loading a folder": ("model/hf", "load families rope experts weights", 800),
    "a mixture of experts": ("model/moe", "layer router permute experts balance", 700),
    "ZeRO-1 and 2": ("parallel/zero", "optimizer reducer ../data_parallel/reducer ../slices", 650),
    "FSDP": ("parallel/fsdp", "fully_shard param_group flat_param ../slices state", 1030),
    "saving a run": ("train/checkpoint", "state shares writer manifest background", 800),
    "restoring a run": ("train/checkpoint", "state manifest shares reader checksum", 800),
    "request to token": (
        "serve",
        "engine requests/params requests/request requests/table schedule/sequence schedule/scheduler schedule/blocks "
        "run/model_runner sample/next_tokens sample/reference",
        1850,
    ),
    "prefix cache": ("serve", "schedule/blocks schedule/sequence", 350),
    "quantized weights": ("quantize", "formats linear kernels in_place", 720),
    "rounding with calibration": ("quantize", "calibrate rescale gptq in_place", 480),
    "quantized folders": ("quantize", "folder words hub", 420),
    "sampler": ("serve", "sample/reference sample/batch sample/selection", 480),
}
LONGER = {"train/strategies/hybrid.py": 365, "cli/train.py": 333}  # than 330 lines; to be cut


@pytest.mark.parametrize("mechanism", PATHS)
def test_a_mechanism_is_read_in_one_sitting(mechanism):
    package, names, most = PATHS[mechanism]
    listed = ast.get_docstring(ast.parse((HERE / package / "__init__.py").read_text(encoding="utf-8")))
    files = [f"{name}.py" for name in names.split()]
    assert [file for file in files if file not in listed] == []
    lines = sum(len((HERE / package / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= most, f"{lines} lines in {len(files)} files"


def test_no_file_is_long():
    lines = {str(path.relative_to(HERE)): len(path.read_text().splitlines()) for path in HERE.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > LONGER.get(path, 330)} == {}
