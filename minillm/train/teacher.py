"""A trained model beside the one in training, which learns its next-token distributions (model/distillation.py).

    microbatch ──▶ teacher, without gradients ──▶ logits ──▶ the student's loss

Every rank of a run holds the whole teacher, and asks it about its own rows.
"""

from functools import partial

import torch
from torch import Tensor

from minillm.data import Batch, TokenDataset, dataset_of
from minillm.model import ModelConfig, Transformer
from minillm.model.distillation import Goals
from minillm.train.config import TrainConfig
from minillm.train.precision import PRECISIONS


class Teacher:
    """`model` stays as it is: its parameters are frozen, and moved to the device. dataset: of the windows that are
    trained on. ValueError if it knows other tokens than the student, or has a shorter context than the windows."""

    def __init__(self, model: Transformer, config: TrainConfig, dataset: TokenDataset, device: torch.device):
        self.check(model.config, config)
        self.model, self.config, self.device = model.to(device).requires_grad_(False), config, device
        self.positions = dataset.positions
        self.windows = dataset_of(dataset.tokens, dataset.seq_len)

    @staticmethod
    def check(teacher: ModelConfig, config: TrainConfig) -> None:
        """ValueError if it cannot teach this run's student."""
        if teacher.vocab_size != config.model.vocab_size:
            raise ValueError(
                f"the teacher's vocabulary is {teacher.vocab_size}, the student's {config.model.vocab_size}: both have "
                "to know the same tokens, so choose a teacher with the student's tokenizer."
            )
        if teacher.max_seq_len < config.seq_len:
            raise ValueError(
                f"the teacher's context is {teacher.max_seq_len} tokens, seq_len is {config.seq_len}: use a shorter "
                "seq_len or another teacher."
            )

    @torch.no_grad()
    def goals(self, batch: Batch, documents: Tensor | None = None) -> Goals:
        """What the teacher says of a microbatch, at the positions that this rank has. It reads whole windows."""
        inputs, attention = batch.inputs, self.model.attention
        if self.positions is not None:
            inputs = self.windows.batch(batch.indices)[0]
        if documents is not None:
            attention = partial(attention, segments=documents)
        with PRECISIONS[self.config.precision].context(self.device):
            logits = self.model(inputs.to(self.device), attention=attention)
        if self.positions is not None:  # those beyond the window are padding, which does not count
            own = torch.as_tensor(self.positions).clamp(max=self.config.seq_len - 1)
            logits = logits[:, own.to(self.device)]
        return Goals(logits, self.config.distil_share, self.config.distil_temperature)
