"""ZeRO stage 3, fully sharded data parallelism: weights too are whole only while they are used. Reading path:

1. `fully_shard.py`: the walk through forward and backward, what is unsharded when
2. `param_group.py`: what is unsharded together, in which order, and how a module is divided
3. `flat_param.py`: one flat parameter: unshard, reshard, reduce
4. `state.py`: its optimizer and saved states (aside)
5. `../placement.py`: `FlatShard`, the norm, and how slices become whole tensors (aside)
"""
