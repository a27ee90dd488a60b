"""Requests from prompt to output.

`params.py` says what one asks for, `request.py` holds its samples and its output, `table.py` all that have not ended,
and `summary.py` sums up what many got.
"""
