"""Data parallelism: the batch is cut, gradients are averaged over the ranks. Reading path:

1. `ddp.py`: what a replica is, and the three forms of averaging (one by one, all at the end, in buckets)
2. `reducer.py`: buckets, hooks, and the reduction that hides behind backward
3. `compression.py`: fewer bytes for a gradient (aside)
"""
