"""The mechanisms that spread a model over ranks, one folder per axis, all written with `placement.py`.

data_parallel/      replicas that average their gradients
zero/               replicas that share optimizer state, and gradients
fsdp/               ranks that share everything and gather weights when they are needed
tensor_parallel/    ranks that share every layer, and the sequence between layers
pipeline_parallel/  ranks that hold layers one after the other
context_parallel/   ranks that hold parts of the sequence, in attention too
expert_parallel/    ranks that hold some of a layer's experts, to which tokens travel
"""

from minillm.parallel.data_parallel.ddp import BucketedDDP, FlatDDP, NaiveDDP
from minillm.parallel.fsdp.fully_shard import FullyShard
from minillm.parallel.pipeline_parallel.runtime import Pipeline
from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
from minillm.parallel.zero.optimizer import ZeroOptimizer

__all__ = [
    "BucketedDDP",
    "ColumnParallelLinear",
    "FlatDDP",
    "FullyShard",
    "NaiveDDP",
    "Pipeline",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "ZeroOptimizer",
    "schedules",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
