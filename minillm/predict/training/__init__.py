"""Closed forms of one training step, a file for each axis, and the memory of a whole step.

sharding.py      data parallelism and ZeRO 1 to 3: bytes sent and held
tensor.py        tensor and sequence parallelism
pipeline.py      bubbles, and microbatches in flight
context.py       variants of ring attention
moe.py           experts: imbalance, all-to-alls, states
activations.py   what one block keeps for its backward pass
adapters.py      adapters beside frozen weights: numbers, FLOPs, memory, many in a batch
memory.py        every byte of a step on one rank of a layout, and its peak
"""
