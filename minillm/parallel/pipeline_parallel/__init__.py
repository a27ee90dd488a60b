"""Pipeline parallelism: layers are divided among ranks, microbatches travel through them.

Read in this order:

    actions.py    what a schedule is: actions, the routes of microbatches, what each action needs
    schedules.py  GPipe, 1F1B, interleaved, zero bubble, DualPipe: which rank does what, in which order
    messages.py   where sends and receives stand in these orders, so that no transport can deadlock
    stages.py     parts of the model, balanced, and a module that holds one
    runtime.py    `Pipeline`: carries a schedule out on real ranks

Beside it: check.py (can a schedule run at all?), simulate.py (how long does it take?), memory.py (what does each rank
hold?), split_backward.py (weight gradients that are put off), shared_parameters.py (gradients of tied embeddings).
"""
