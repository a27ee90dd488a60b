"""Training: the loop, what makes it fit (precision, activation checkpointing), checkpoints, and the strategies that
spread it over ranks.

Reading path: config.py, trainer.py, optimizer.py, strategies/ (single_device.py, hybrid.py), run.py. With a teacher
beside the model: teacher.py, ../model/distillation.py. From pairs of answers: preference.py.
"""

from minillm.train.activation_checkpointing import EXPENSIVE, activation_checkpoint, checkpoint_blocks
from minillm.train.config import TrainConfig
from minillm.train.fault_tolerance.loss_spike import LossSpikeGuard
from minillm.train.optimizer import adamw, decay_groups, learning_rate
from minillm.train.parallel_config import ParallelConfig
from minillm.train.precision import PRECISIONS, LossScaler, MasterWeights
from minillm.train.presets import preset
from minillm.train.run import RunResult, fit
from minillm.train.steptime import Step, StepTime
from minillm.train.strategies.hybrid import Hybrid
from minillm.train.strategies.single_device import SingleDevice
from minillm.train.trainer import Trainer
from minillm.train.validation import Validation, validate

__all__ = [
    "EXPENSIVE",
    "PRECISIONS",
    "Hybrid",
    "LossScaler",
    "LossSpikeGuard",
    "MasterWeights",
    "ParallelConfig",
    "RunResult",
    "SingleDevice",
    "Step",
    "StepTime",
    "TrainConfig",
    "Trainer",
    "Validation",
    "activation_checkpoint",
    "adamw",
    "checkpoint_blocks",
    "decay_groups",
    "fit",
    "learning_rate",
    "preset",
    "validate",
]
