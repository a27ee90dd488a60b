"""Tensor parallelism: every layer is cut over ranks, and activations are summed.

Read in this order:

    regions.py      the two ends of a parallel region: copy_to and reduce_from, gather_from and scatter_to
    layers.py       column and row layers between these ends, and the sum that travels while weights are differentiated
    vocab.py        embedding, head and loss of a vocabulary that is cut by words
    plan.py         which part of every parameter a rank holds: rules that give placements
    parallelize.py  `tensor_parallel`: cuts a Transformer in place

Beside it: experts.py (a layer of experts, whose router stays whole); for inference, load.py (a folder of which each
rank reads its part) and quantized.py (codes are cut as their weights are).
"""
