"""Expert parallelism: experts lie on different ranks, tokens travel to them and back. Reading path:

1. `split.py`: which rank has which experts, and over whom their gradients are summed
2. `dispatch.py`: the two all-to-alls of a layer, and the order of rows
3. `exchange.py`: an all-to-all of unequal parts inside the graph, behind which other work can hide
4. `nodes.py`: two levels, for links between nodes that are slower than those inside
"""

from minillm.parallel.expert_parallel.dispatch import ExpertDispatch
from minillm.parallel.expert_parallel.nodes import NodeDispatch
from minillm.parallel.expert_parallel.split import expert_parallel

__all__ = ["ExpertDispatch", "NodeDispatch", "expert_parallel"]
