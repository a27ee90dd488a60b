"""What the axes of parallelism share: which part of a whole tensor a rank holds, and how it steps and saves that part.

1. `placement.py`: where a part lies in the whole tensor; gathering parts, and the norm of all of them
2. `slices.py`: ZeRO's and FSDP's shard of a flat tensor, parameter by parameter
3. `optimizer_state.py`: a torch optimizer over such slices

Aside: `offload.py`, shards in host memory or files; `sharded_gradient.py`, torch's tools on slices.
"""
