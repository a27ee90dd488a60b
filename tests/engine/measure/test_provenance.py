import datetime
import os
import platform
import sys

import torch

from minillm.measure.provenance import provenance, summary


def test_says_what_where_when_and_how():
    origin = provenance()
    assert origin["versions"]["torch"] == torch.__version__
    assert origin["versions"]["python"] == platform.python_version()
    assert origin["cores"] == os.cpu_count() and origin["memory_bytes"] > 0 and origin["hardware"]
    assert datetime.datetime.fromisoformat(origin["date"]).utcoffset() == datetime.timedelta(0)


def test_command_is_exact_and_names_no_folder_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/home/me/.venv/bin/python", "-m", "minillm", "tour", "--json", "a b.json"])
    origin = provenance()
    assert origin["command"] == "python -m minillm tour --json 'a b.json'"
    assert provenance("make figures")["command"] == "make figures"
    assert origin["command"] in summary(origin) and "\n" not in summary(origin)
