"""Data parallelism: the batch is cut, gradients are averaged over the ranks. Reading path:

1. `ddp.py`: what a replica is, and the three forms of averaging (one by one, all at the end, in buckets)
2. `reducer.py`: gradients in buckets, hooks, and the reduction that hides behind backward
3. `packing.py`: what a bucket is, and which parameters share one

Aside: `replicas.py`, replicas that start equal and stay so, and who owns gradients; `compression.py`, fewer bytes.
"""
