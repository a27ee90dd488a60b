"""Training: the loop, what makes it fit (precision, recomputation, checkpoints), and how it is spread over ranks."""

from minillm.train.config import TrainConfig
from minillm.train.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP
from minillm.train.fully_shard import FullyShard
from minillm.train.guard import Guard
from minillm.train.layout import Layout
from minillm.train.loop import Step, Trainer
from minillm.train.optimizer import adamw, clip_, decay_groups, learning_rate, squared_norm
from minillm.train.parallel import Alone
from minillm.train.pipeline import Pipeline
from minillm.train.precision import PRECISIONS, LossScaler, MasterWeights, flushed_share, repeated_update
from minillm.train.presets import preset
from minillm.train.recompute import EXPENSIVE, recompute, recompute_blocks
from minillm.train.run import Run, fit
from minillm.train.schedules import (
    SCHEDULES,
    check,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    simulate,
    zero_bubble,
    zero_bubble_v,
)
from minillm.train.stages import ModelPart, balance, build_parts, layer_costs
from minillm.train.steptime import StepTime
from minillm.train.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from minillm.train.validation import Validation, validate
from minillm.train.zero import ZeroOptimizer

__all__ = [
    "EXPENSIVE",
    "PRECISIONS",
    "SCHEDULES",
    "Alone",
    "BucketedDDP",
    "ColumnParallelLinear",
    "DataParallel",
    "FlatDDP",
    "FullyShard",
    "Guard",
    "Layout",
    "LossScaler",
    "MasterWeights",
    "ModelPart",
    "NaiveDDP",
    "Pipeline",
    "RowParallelLinear",
    "Run",
    "Step",
    "StepTime",
    "TrainConfig",
    "Trainer",
    "Validation",
    "VocabParallelEmbedding",
    "ZeroOptimizer",
    "adamw",
    "balance",
    "build_parts",
    "check",
    "clip_",
    "decay_groups",
    "dualpipe",
    "fit",
    "flushed_share",
    "gpipe",
    "interleaved",
    "layer_costs",
    "learning_rate",
    "one_f_one_b",
    "pipedream",
    "preset",
    "recompute",
    "recompute_blocks",
    "repeated_update",
    "simulate",
    "squared_norm",
    "tensor_parallel",
    "validate",
    "vocab_parallel_cross_entropy",
    "zero_bubble",
    "zero_bubble_v",
]
