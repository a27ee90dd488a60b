"""What the axes of parallelism share: which part of a whole tensor a rank holds, and how it steps and saves that part.

1. `placement.py`: where a part lies in the whole tensor, and the norm of all parts; `gather.py`: the whole tensors
2. `slices.py`: ZeRO's and FSDP's shard of a flat tensor, parameter by parameter
3. `optimizer.py`: a torch optimizer over such slices
4. `state.py`: what a rank holds of a run; `full_state.py`: whole states of it, and back

Aside: `offload.py`, shards in host memory or files; `sharded_gradient.py`, torch's tools on slices.
"""
