import dataclasses

import pytest

from minillm.measure.machine import Machine, _Cache


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder to work in, with its own cache that holds a made-up machine card: nothing is measured in a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    unmeasured = {field.name: 0 for field in dataclasses.fields(Machine)}
    _Cache().write(
        Machine.from_json(unmeasured | {"links": {}, "gpu": None, "peak_flops": 1e9, "peak_flops_bf16": 1e9})
    )
    text = tmp_path / "text"
    text.mkdir()
    for part in range(30):
        lines = [f"def f{part}_{n}(x):\n    return x + {n * part % 7}\n" for n in range(60)]
        (text / f"part{part}.py").write_text("\n".join(lines))
    return tmp_path
