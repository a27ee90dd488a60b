"""Which layout trains or serves a model on a cluster, by arithmetic: every layout's memory and step time, ranked.

Reading path:
1. `layout.py`   a layout: how many ranks each axis has, how they are placed, which link each axis uses
2. `memory.py`   bytes on the fullest rank by kind, and how many microbatches are in flight
3. `compute.py`  seconds of a layer's matrix products, attention and memory traffic on one rank
4. `step.py`     a step from its microbatches: compute, each axis's communication, bubble, optimizer
5. `search.py`   all layouts of a model on a cluster, ranked, and why each runner-up loses
6. `serving.py`  the same for serving: weights, KV cache, batch, time to first token and per output token
7. `pools.py`    prefill and decode on GPUs of their own: how many for each, beside all of them doing both

The same for the trainer in this repository, which can be held to what it does (`python -m minillm plan
--this-machine`): `traffic.py` every operation of a step, to the byte; `trainer.py` its seconds on measured links, put
together by the same `step.assemble`; `../training/memory.py` its peak.

Inputs: `architectures.py` (models) and `clusters.py` (devices and links), both tables with sources. `published.py`
holds runs whose layout and speed are public. `fit.py` fits five constants to one half of them and judges them on the
other. `published_memory.py` holds peaks of memory that are public, `training_codes.py` what the codes that reached them
hold beside the planner's bytes; nothing is fitted to either.
"""
