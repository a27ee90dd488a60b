"""Pipeline parallelism: layers are divided among ranks, microbatches travel through them.

Read in this order:

    schedule/actions.py    what a schedule is: actions, the routes of microbatches, what each action needs
    schedule/orders.py     GPipe, 1F1B, interleaved, zero bubble, DualPipe: which rank does what, in which order
    schedule/messages.py   where sends and receives stand in these orders, so that no transport can deadlock
    stages.py              parts of the model, balanced, and a module that holds one
    runtime.py             `Pipeline`: carries a schedule out on real ranks

Beside it: schedule/check.py (can a schedule run at all?), schedule/simulate.py (how long does it take?),
schedule/memory.py (what does each rank hold?), schedule/schedules.py (all of these under one name),
../split_backward.py (weight gradients that are put off), shared_parameters.py (gradients of tied embeddings),
held_parts.py (a rank's several parts as one module).
"""
