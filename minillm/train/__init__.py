"""Training: the loop on one device, and what makes it fit and run: precision, recomputation, checkpoints."""

from minillm.train.config import TrainConfig
from minillm.train.ddp import BucketedDDP, DataParallel, FlatDDP, NaiveDDP
from minillm.train.fully_shard import FullyShard
from minillm.train.guard import Guard
from minillm.train.loop import Step, Trainer
from minillm.train.optimizer import adamw, clip_, decay_groups, learning_rate, squared_norm
from minillm.train.parallel import Alone
from minillm.train.precision import PRECISIONS, LossScaler, MasterWeights, flushed_share, repeated_update
from minillm.train.presets import preset
from minillm.train.recompute import EXPENSIVE, recompute, recompute_blocks
from minillm.train.run import Run, fit
from minillm.train.steptime import StepTime
from minillm.train.validation import Validation, validate
from minillm.train.zero import ZeroOptimizer

__all__ = [
    "EXPENSIVE",
    "PRECISIONS",
    "Alone",
    "BucketedDDP",
    "DataParallel",
    "FlatDDP",
    "FullyShard",
    "Guard",
    "LossScaler",
    "MasterWeights",
    "NaiveDDP",
    "Run",
    "Step",
    "StepTime",
    "TrainConfig",
    "Trainer",
    "Validation",
    "ZeroOptimizer",
    "adamw",
    "clip_",
    "decay_groups",
    "fit",
    "flushed_share",
    "learning_rate",
    "preset",
    "recompute",
    "recompute_blocks",
    "repeated_update",
    "squared_norm",
    "validate",
]
