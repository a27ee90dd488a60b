"""ZeRO stage 3, fully sharded data parallelism: weights too are whole only while they are used. Reading path:

1. `fully_shard.py`: the walk through forward and backward, what is unsharded when
2. `param_group.py`: what is unsharded together, and in which order
3. `flat_param.py`: one flat parameter: unshard, reshard, reduce

Aside: `build.py`, how a module is divided; `state.py`, its optimizer and saved states; `pipelined.py`, the parts of a
pipeline; `../slices.py`, a shard by parameter, as optimizers see it, and hybrid sharding; `../placement.py`, the norm.
"""
