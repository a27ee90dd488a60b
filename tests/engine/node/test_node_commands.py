"""`minillm train` and `minillm generate` on the pretended node: the numbers and the text of the CPU."""

import json
from pathlib import Path

import pytest

from minillm.__main__ import run
from tests.engine.node.launching import whole_machine
from tests.engine.node.node import pretend_node

pytestmark = pytest.mark.full
TRAIN = "train --model-size tiny --steps 3 --seq-len 32 --batch-size 4 --validate-every 3 --save-every 2"
GENERATE = "generate --model draft --max-new-tokens 12 --dtype float32"


def losses(options: str, folder: Path) -> list[float]:
    text = folder / "text.py"
    text.write_text("\n".join(f"def f{n}(x):\n    return x * {n} + {n * n % 7}" for n in range(2000)))
    argv = [
        *TRAIN.split(),
        *options.split(),
        "--data",
        str(text),
        "--runs",
        str(folder),
        "--json",
        str(folder / "json"),
    ]
    assert run(argv) == 0
    return json.loads((folder / "json").read_text())["losses"]


@pytest.mark.parametrize("layout", ["", "--dp 2 --zero 2", "--tp 2 --sp", "--pp 2"])
def test_train(layout: str, tmp_path: Path) -> None:
    folders = [tmp_path / device for device in ("cpu", "cuda")]
    for folder in folders:
        folder.mkdir()
    expected = losses(f"{layout} --device cpu", folders[0])
    with whole_machine():
        found = losses(layout, folders[1])
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("options", ["", "--speculate ngram", "--tp 2", "--pp 2"])
def test_generate(options: str, capsys: pytest.CaptureFixture) -> None:
    argv = [*GENERATE.split(), "--temperature", "0", *options.split(), "def main"]
    assert run([*argv, "--device", "cpu"]) == 0
    expected = capsys.readouterr().out
    with whole_machine():
        assert run([*argv, "--device", "cuda"]) == 0
    assert capsys.readouterr().out == expected and len(expected) > len("def main")


def test_generate_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main\nimport\nclass A\n")
    texts = {}
    for device in ("cpu", "cuda"):
        argv = [*GENERATE.split(), "--batch", str(prompts), "--temperature", "0", "--device", device]
        argv += ["--json", str(tmp_path / device)]
        if device == "cpu":
            assert run(argv) == 0
        else:
            with pretend_node():
                assert run(argv) == 0
        texts[device] = [row["answers"] for row in json.loads((tmp_path / device).read_text())["rows"]]
    assert texts["cuda"] == texts["cpu"]
