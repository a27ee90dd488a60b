"""Every test here has its own registry and its own progress file."""

import pytest

from course.kit import exercises, progress


@pytest.fixture(autouse=True)
def own_registry_and_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "_exercises", {})
    monkeypatch.setattr(exercises, "_answers", {})
    monkeypatch.setattr(exercises, "_modules", lambda kind, lab="": [])
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.delenv("MINILLM_STRICT", raising=False)
    monkeypatch.setattr(progress, "_unsaved", {})
    progress._warn_once.cache_clear()
