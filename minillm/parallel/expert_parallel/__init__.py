"""Expert parallelism: experts lie on different ranks, tokens travel to them and back. Reading path:

1. `dispatch.py`: permutation, counts, and the two all-to-alls of a layer
2. `exchange.py`: an all-to-all of unequal parts inside the graph, which other work can hide
3. `nodes.py`: two levels, for links between nodes that are slower than those inside
4. `balance.py`: which expert lives where, replicas of hot ones, and what that is worth
"""
