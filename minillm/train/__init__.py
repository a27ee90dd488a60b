"""Training: the loop, what makes it fit (precision, activation checkpointing), checkpoints, and the strategies that
spread it over ranks.

Reading path: config.py, trainer.py, optimizer.py, strategies/ (single_device.py, hybrid.py), run.py.
"""

from minillm.parallel import (
    BucketedDDP,
    ColumnParallelLinear,
    FlatDDP,
    FullyShard,
    NaiveDDP,
    Pipeline,
    RowParallelLinear,
    VocabParallelEmbedding,
    ZeroOptimizer,
    schedules,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from minillm.parallel.pipeline_parallel.schedules import (
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
from minillm.parallel.pipeline_parallel.stages import ModelPart, balance, build_parts, layer_costs
from minillm.parallel.sharding.placement import clip_, global_norm
from minillm.train.activation_checkpointing import EXPENSIVE, activation_checkpoint, checkpoint_blocks
from minillm.train.config import TrainConfig
from minillm.train.fault_tolerance.loss_spike import LossSpikeGuard
from minillm.train.optimizer import adamw, decay_groups, learning_rate
from minillm.train.parallel_config import ParallelConfig
from minillm.train.precision import PRECISIONS, LossScaler, MasterWeights
from minillm.train.presets import preset
from minillm.train.run import RunResult, fit
from minillm.train.steptime import StepTime
from minillm.train.strategies.hybrid import Hybrid
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Step, Trainer
from minillm.train.validation import Validation, validate

__all__ = [
    "EXPENSIVE",
    "PRECISIONS",
    "SCHEDULES",
    "BucketedDDP",
    "ColumnParallelLinear",
    "FlatDDP",
    "FullyShard",
    "Hybrid",
    "LossScaler",
    "LossSpikeGuard",
    "MasterWeights",
    "ModelPart",
    "NaiveDDP",
    "ParallelConfig",
    "Pipeline",
    "RowParallelLinear",
    "RunResult",
    "SingleDevice",
    "Step",
    "StepTime",
    "TrainConfig",
    "Trainer",
    "Validation",
    "VocabParallelEmbedding",
    "ZeroOptimizer",
    "activation_checkpoint",
    "adamw",
    "balance",
    "build_parts",
    "check",
    "checkpoint_blocks",
    "clip_",
    "decay_groups",
    "dualpipe",
    "fit",
    "global_norm",
    "gpipe",
    "interleaved",
    "layer_costs",
    "learning_rate",
    "one_f_one_b",
    "pipedream",
    "preset",
    "schedules",
    "simulate",
    "tensor_parallel",
    "validate",
    "vocab_parallel_cross_entropy",
    "zero_bubble",
    "zero_bubble_v",
]
