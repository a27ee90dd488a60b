"""ZeRO stage 3, fully sharded data parallelism: weights too are whole only while they are used. Reading path:

1. `fully_shard.py`: the walk through forward and backward, what is unsharded when
2. `param_group.py`: how a module is divided, what is unsharded together, and in which order
3. `flat_param.py`: one flat parameter: unshard, reshard, reduce
4. `../sharding/slices.py`: this rank's shard, parameter by parameter, as optimizers see it; settings; hybrid sharding
5. `state.py`: its optimizer, its saved states, and what torch habits expect of the module

Aside: `../sharding/placement.py`, the norm; `../sharding/full_state.py`, how optimizer state becomes whole.
"""
