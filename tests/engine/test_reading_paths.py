"""Each mechanism is read in few files: they exist, are short together, and their package's docstring names them."""

import ast
from pathlib import Path

import pytest

import minillm

HERE = Path(minillm.__file__).parent
PATHS = {  # mechanism: (package, files in reading order, most lines of all)
    "a collective on NCCL": ("comm", "group operation backends/native", 600),
    "ring all-reduce on the CPU": ("comm", "group operation backends/cpu collectives/ring backends/sockets", 755),
    "a forward pass": ("model", "config transformer initialise rope loss", 905),
    "attention in tiles": ("model/attention", "causal tiled tiled_triton tiled_kernels", 770),
    "paged attention": ("model/paged", "cache tables backend gather loop", 505),
    "paged attention on a GPU": ("model/paged", "cache tables backend split triton", 655),
    "quantized cache": ("model/paged", "quantized cache gather triton ../../quantize/kv", 720),
    "loading a folder": ("model/hf", "load families rope experts weights", 775),
    "a mixture of experts": ("model/moe", "layer router permute experts balance", 575),
    "DDP": ("parallel/data_parallel", "ddp reducer packing", 420),
    "ZeRO-1 and 2": ("parallel/zero", "optimizer reducer ../data_parallel/reducer ../sharding/slices", 675),
    "FSDP": ("parallel/fsdp", "fully_shard param_group flat_param ../sharding/slices state", 985),
    "tensor parallelism": ("parallel/tensor_parallel", "regions layers vocab plan parallelize", 770),
    "pipeline parallelism": (
        "parallel/pipeline_parallel",
        "schedule/actions schedule/orders schedule/messages stages runtime",
        955,
    ),
    "context parallelism": ("parallel/context_parallel", "order ring exchange variants", 540),
    "expert parallelism": ("parallel/expert_parallel", "split dispatch exchange nodes", 375),
    "a layout of several axes": ("train/strategies", "../parallel_config groups single_device hybrid", 855),
    "the state of a layout": ("parallel/sharding", "placement gather state full_state", 650),
    "saving a run": ("train/checkpoint", "../../parallel/sharding/state shares writer manifest", 800),
    "restoring a run": ("train/checkpoint", "../../parallel/sharding/state manifest shares reader", 800),
    "request to token": (
        "serve",
        "engine requests/params requests/request requests/table schedule/sequence schedule/scheduler schedule/blocks "
        "schedule/held run/core run/step run/step_inputs run/model_runner sample/next_tokens sample/reference",
        1990,
    ),
    "an engine over ranks": ("serve/ranks", "engine message runner part", 515),
    "an engine over stages": ("serve/ranks", "stage stage_runner reply ../run/pipelined", 355),
    "keys handed over": ("serve/transfer", "decode receive prefill send layout", 961),
    "a rank's part of a folder": ("parallel/tensor_parallel", "plan load quantized", 425),
    "prefix cache": ("serve", "schedule/blocks schedule/sequence", 350),
    "quantized weights": ("quantize", "formats linear kernels in_place", 745),
    "rounding with calibration": ("quantize", "calibrate rescale gptq in_place", 460),
    "quantized folders": ("quantize", "folder words hub", 365),
    "adapters": ("adapters", "lora attach parallel start peft_folder", 875),
    "serving many adapters": ("adapters", "grouped routed store ../serve/run/adapters", 470),
    "serving adapters over ranks": ("adapters", "cut ../serve/ranks/adapters", 115),
    "a request over HTTP": ("api", "entry app protocol connection answers limits tenants", 1115),
    "a router": ("api/router", "policies health budget fleet forward app", 900),
    "fair sharing": ("serve", "schedule/share schedule/fair schedule/even_steps schedule/scheduler", 690),
    "sampler": ("serve", "sample/reference sample/batch sample/selection", 445),
}


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
    assert {path: count for path, count in lines.items() if count > 320} == {}
