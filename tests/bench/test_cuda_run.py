"""`make cuda` without a GPU: parts that pass, fail, hang or do not fit, and the page made of what they leave."""

import json
import sys
import time

import psutil
import pytest

from minillm.bench import cuda, gpu_page
from minillm.bench.cuda import PARTS, Outcome, Part, run
from minillm.bench.harness import BenchRow
from minillm.measure.provenance import provenance

SAVES = "import json, sys; json.dump({'rows': []}, open(sys.argv[1], 'w')); print('saved')"
HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"]).pid, flush=True)
time.sleep(99)
"""


def part(name, program, limit_s=60.0, gpus=1):
    return Part(name, f"about {name}", ("-c", program, "{json}"), limit_s, gpus)


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


def test_every_part_has_its_turn_and_none_stops_the_others(tmp_path, logs, capsys):
    parts = [
        part("good", SAVES),
        part("bad", "print('so far'); raise ValueError('no good')"),
        part("wide", SAVES, gpus=8),
        part("hanging", HANGS, limit_s=1.0),
        part("last", "print('done')"),
    ]
    start = time.monotonic()
    outcomes = run(parts, tmp_path, gpus=2, limit_s=60.0)
    assert time.monotonic() - start < 40
    assert [each.status for each in outcomes] == ["passed", "failed", "skipped", "timed out", "passed"]
    assert outcomes[0].note == "saved" and outcomes[1].note == "ValueError: no good"
    assert outcomes[2].note == "it needs 8 GPUs, and there is 2"
    assert json.loads((tmp_path / "cuda_good.json").read_text()) == {"rows": []}
    saved = json.loads((tmp_path / "cuda_run.json").read_text())
    assert [each["status"] for each in saved["parts"]] == [each.status for each in outcomes]
    assert saved["provenance"]["command"] == "make cuda" and {each["gpus"] for each in saved["parts"]} == {2}
    child = int((logs / "hanging.log").read_text().split()[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert "so far" in capsys.readouterr().out  # of a part that failed the end of its output is shown


def test_a_run_of_some_parts_keeps_what_was_said_of_the_others(tmp_path, logs):
    run([part("good", "print('first')"), part("bad", "raise ValueError('no good')")], tmp_path, gpus=2, limit_s=60.0)
    run([part("bad", "print('mended')")], tmp_path, gpus=1, limit_s=60.0)
    good, bad = json.loads((tmp_path / "cuda_run.json").read_text())["parts"]
    assert (good["name"], good["note"], good["gpus"]) == ("good", "first", 2)
    assert (bad["name"], bad["note"], bad["gpus"]) == ("bad", "mended", 1)
    assert good["where"] == bad["where"] != ""


def test_files_with_tests_for_a_gpu():
    found, root = cuda.tests(), cuda.ROOT
    assert {"tests/engine/model/test_paged_triton.py", "tests/engine/serve/test_engine_cuda.py"} < set(found)
    assert not [name for name in found if name.startswith(cuda.RANKS) or "mark.cuda" not in (root / name).read_text()]


def test_what_there_is_no_time_for_is_skipped(tmp_path, logs):
    outcomes = run([part("slow", HANGS), part("late", SAVES)], tmp_path, gpus=1, limit_s=0.5)
    assert [(each.status, each.note) for each in outcomes[1:]] == [("skipped", "no time was left")]
    assert outcomes[0].status == "timed out"


@pytest.mark.parametrize(("statuses", "expected"), [(["passed", "skipped"], 0), (["passed", "timed out"], 1)])
def test_exit_status(statuses, expected, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "run", lambda *_: [Outcome("x", status, 1.0, "") for status in statuses])
    assert CliRunner().invoke(cuda.app, ["--out", str(tmp_path)]).exit_code == expected


def test_without_a_gpu_nothing_is_run(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(cuda.app, ["--out", str(tmp_path)])
    assert done.exit_code == 0 and "finds no GPU" in done.output and not list(tmp_path.iterdir())


def test_parts_by_name():
    assert [each.name for each in cuda.chosen("layouts, ranks")] == ["ranks", "layouts"]
    with pytest.raises(ValueError, match="--parts has no nonsense: choose among machine, ranks"):
        cuda.chosen("nonsense")


@pytest.mark.parametrize("each", PARTS, ids=[each.name for each in PARTS])
def test_a_part_names_what_is_there(each):
    """Its command, its benchmark and the options it gives exist; what a test folder is called, too."""
    if each.argv[:3] == ("-m", "minillm", "bench"):
        from minillm.bench import BENCHES

        assert each.argv[3] in BENCHES
    for argument in each.argv:
        if argument.startswith("tests"):
            assert (cuda.ROOT / argument).is_dir()
    assert sys.executable and each.limit_s <= 330


# The page.


def test_the_page_is_up_to_date():
    assert gpu_page.PAGE.read_text() == gpu_page.page(), "make it anew: python -m minillm.bench.gpu_page"


def test_a_page_of_nothing_says_so(tmp_path):
    said = gpu_page.page(tmp_path)
    assert "**Nothing of this has been measured on a GPU yet**" in said and said.count("never ran") == len(PARTS)


def test_a_page_of_a_run(tmp_path):
    """Made-up results: rows, a card, a part that failed, one that was skipped and one that had no file."""
    origin = provenance("make cuda") | {"hardware": "Made-up CPU, Made-up GPU", "date": "2030-01-02T03:04:05+00:00"}
    row = BenchRow("fsdp, 8 ranks, cuda", "peak of a GPU (MFU)", 400.0, 800.0, "TFLOP/s", 0.5, 0.01, 5, True)
    card = {"gpu": {"name": "Made-up GPU", "memory_bytes": 80 * 2**30, "peak_flops_bf16": 8e14}, "measured": "x"}
    card["gpu"] |= {"peak_flops_fp32": 5e13, "memory_bandwidth_bytes_per_s": 3.3e12}
    eight, one = (8, "Made-up CPU, Made-up GPU, 2030-01-02"), (1, "Another")
    outcomes = [
        Outcome("machine", "passed", 20.0, "anything", *eight),
        Outcome("ranks", "passed", 99.0, "41 passed, 3 skipped in 98.20s", *eight),
        Outcome("layouts", "failed", 12.0, "a | b", *eight),
        Outcome("comm", "skipped", 0.0, "it needs 2 GPUs, and there is 1", *one),
    ]
    files = {
        "run": {"provenance": origin, "parts": [vars(each) for each in outcomes]},
        "layouts": {"provenance": origin, "rows": [vars(row)], "notes": ["a note."]},
        "machine": card | {"torch": "2.13"},
    }
    for name, content in files.items():
        (tmp_path / f"cuda_{name}.json").write_text(json.dumps(content))
    said = gpu_page.page(tmp_path)
    assert "on 8 GPUs (Made-up CPU, Made-up GPU, 2030-01-02): machine, ranks, layouts; on 1 GPU (Another)" in said
    assert "Nothing of this" not in said
    assert "| passed in 99 s: 41 passed, 3 skipped in 98.20s |" in said and "| passed in 20 s |" in said
    assert "| failed in 12 s: a \\| b |" in said and "| skipped: it needs 2 GPUs, and there is 1 |" in said
    assert "| fsdp, 8 ranks, cuda | peak of a GPU (MFU) | 400 | 800 | TFLOP/s | 0.50 |" in said and "a note." in said
    assert "| memory bandwidth | 3,300 GB/s |" in said and "| memory | 80 GiB |" in said
    assert said.count("never ran") == len(PARTS) - len(outcomes)
