"""ZeRO stages 1 and 2: optimizer state, then gradients, 1/N per rank. Reading path, after `data_parallel/reducer.py`:

1. `shard.py`: one bucket as one rank sees it
2. `optimizer.py`: the reducer with a reduce-scatter, and a step of the own shards that is handed round
3. `../placement.py`: `FlatShard`, the norm, and how slices become whole tensors (aside)
4. `../optimizer_state.py`: saving and restoring, and torch's tools on slices (aside)
"""
