"""How one training step is spread over ranks.

    strategy         what a rank steps              mechanism
    SingleDevice     everything                     (one process)
    Hybrid           zero 0: everything             parallel/data_parallel
                     zero 1, 2: 1/N, then all-gather    parallel/zero
                     zero 3: its 1/N                parallel/fsdp
                     tp, pp, cp, ep: its parts, or 1/N of them

Reading path: `../parallel_config.py` (what a layout is), `groups.py` (which ranks talk to each other),
`single_device.py` (the seam to the training loop), `hybrid.py` (a step on several ranks).
"""
