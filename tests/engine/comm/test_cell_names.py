import sys
from types import SimpleNamespace

from minillm.comm.launch.outcome import _name_cells


def test_cells_are_named_by_their_number(monkeypatch):
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={"/tmp/ipykernel_7/33.py": 5}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    text = 'File "/tmp/ipykernel_7/33.py", line 2, in step\n  File "other.py", line 1, in f'
    assert _name_cells(text) == 'File "Cell In[5]", line 2, in step\n  File "other.py", line 1, in f'


def test_outside_a_notebook_nothing_changes(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert _name_cells('File "script.py", line 1') == 'File "script.py", line 1'
