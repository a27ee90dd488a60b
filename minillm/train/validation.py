"""Loss on text the model has not seen: nats per token, and bits per byte, which compares across tokenizers."""

from dataclasses import dataclass

import torch

from minillm.data import ShardedSampler, TokenDataset
from minillm.model.loss import IGNORE
from minillm.predict.model import bits_per_byte
from minillm.train.strategies.single_device import SingleDevice


@dataclass(frozen=True)
class Validation:
    """Mean loss in nats per token over `tokens` held-out tokens, and the same per byte of text."""

    loss: float
    bits_per_byte: float
    tokens: int

    def to_json(self) -> dict[str, float]:
        return {"validation_loss": self.loss, "bits_per_byte": self.bits_per_byte, "validation_tokens": self.tokens}


@torch.no_grad()
def validate(
    model: torch.nn.Module,
    dataset: TokenDataset,
    batch_size: int,
    max_tokens: int | None = None,
    device: torch.device | str = "cpu",
    parallel: SingleDevice | None = None,
    documents: bool = False,
) -> Validation:
    """The loss over every window, once over all ranks; with max_tokens, over about so many tokens in evenly spread
    windows.

    dataset.tokens: a `Tokens`, whose bytes per token turn nats per token into bits per byte. documents: tokens see
    their own document only.
    """
    parallel, tokens = parallel or SingleDevice(), dataset.tokens
    windows = len(dataset) if max_tokens is None else min(len(dataset), max(1, max_tokens // dataset.seq_len))
    total, count = torch.zeros(2, device=device, dtype=torch.float64)
    for places in ShardedSampler(windows, batch_size, parallel.rank, parallel.world_size).one_pass():
        missing = not len(places)  # a rank without windows takes part in the others' communication all the same
        chosen = [0] if missing else places * len(dataset) // windows
        inputs, targets = dataset.batch(chosen)
        targets = targets.fill_(IGNORE) if missing else targets
        with parallel.within(dataset.documents(chosen).to(device) if documents else None):
            nll, weight = model(inputs.to(device), targets=targets.to(device))
        total, count = total + nll.double(), count + weight.double()
    total, count = parallel.sum(torch.stack([total, count])).tolist()
    loss = total / count
    return Validation(loss, bits_per_byte(loss, len(tokens), tokens.text_bytes), int(count))
