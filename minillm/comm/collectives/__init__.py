"""Collectives from scratch: nothing but messages between two ranks. One algorithm a file.

`ring.py`, `tree.py`, `doubling.py` (recursive doubling), `two_level.py` (nodes), `all_to_all.py` (pairwise),
`parameter_server.py`. `x` may have any shape and layout; reductions and broadcasts work in place. With `async_op=True`
each returns a handle. Thakur, Rabenseifner & Gropp 2005; `predict/comms.py` has the cost of each.
"""
