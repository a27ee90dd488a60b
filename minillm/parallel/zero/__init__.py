"""ZeRO stages 1 and 2: optimizer state, then gradients, 1/N per rank. Reading path:

1. `optimizer.py`: a step of the own shards, which is handed round
2. `reducer.py`: the DDP reducer with a reduce-scatter
3. `../data_parallel/reducer.py`: gradients in buckets, and the reduction that hides behind backward
4. `../sharding/slices.py`: this rank's shard, parameter by parameter, as optimizers see it; settings; hybrid sharding

Aside: `../sharding/placement.py`, `FlatShard` and the norm; `../sharding/optimizer.py`, the optimizer over
slices; `../sharding/full_state.py`, its state as one process has it;
`../sharding/sharded_gradient.py`, torch's tools on slices.
"""
