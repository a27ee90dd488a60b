"""The commands of `python -m minillm`, one module each; see `minillm/__main__.py`."""
