"""Requests from prompt to output.

`params.py` says what one asks for, `request.py` holds it and its samples, `table.py` all that have not ended,
`output.py` is what the user gets, `summary.py` sums up what many got, and `recovery.py` ends what an interrupted step
left half done.
"""
