"""What a training run is, as one frozen value: two equal configurations and the same data give the same losses."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from minillm.adapters.lora import LoraConfig
from minillm.model import ModelConfig, MoEConfig, RopeScaling
from minillm.train.activation_checkpointing import MODES
from minillm.train.precision import PRECISIONS


@dataclass(frozen=True)
class TrainConfig:
    """One step computes accumulate · batch_size windows of seq_len tokens, on each rank.

    lr: the highest learning rate, reached after `warmup_steps` and lowered along a cosine to min_lr_share of it.
    precision: see `precision.PRECISIONS`; activation_checkpointing: see `activation_checkpointing.MODES`.
    compile: each block's forward and backward through torch.compile; messages between blocks still overlap.
    documents: tokens see their own document only, where a window holds several.
    max_grad_norm: gradients are scaled down to this global norm; None = never.
    spike_nats: a loss this far above the recent ones is undone, and so is one that is not finite (see
        fault_tolerance/loss_spike.py), for which each rank keeps a copy of its weights and optimizer state in host
        memory; None = nothing is undone, and a loss that is not finite ends the run.
    distil_share, distil_temperature: how much of the loss is a teacher's, and at which temperature; see
        model/distillation.py.
    base: the fingerprint of the folder that training starts from; None = it starts from the seed.
    lora: the rank of adapters, which alone are trained; None = everything is. target: patterns of the layers that have
        one, with commas between; alpha, rslora, lora_dropout: see adapters/lora.py; qlora: the base is kept in 4 bits.
    dpo: β of direct preference optimization, see preference.py; None = the next token's loss.
    """

    model: ModelConfig
    seq_len: int = 256
    batch_size: int = 8
    accumulate: int = 1
    steps: int = 200
    lr: float = 1e-3
    warmup_steps: int = 20
    min_lr_share: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    precision: str = "fp32"
    activation_checkpointing: str = "none"
    compile: bool = False
    documents: bool = False
    seed: int = 0
    spike_nats: float | None = None
    distil_share: float = 0.0
    distil_temperature: float = 2.0
    base: str | None = None
    lora: int | None = None
    target: str = "q,v"
    alpha: float | None = None
    rslora: bool = False
    lora_dropout: float = 0.0
    qlora: bool = False
    dpo: float | None = None

    def __post_init__(self):
        for name in ("seq_len", "batch_size", "accumulate", "steps"):
            _whole(name, getattr(self, name), at_least=1)
        for name in ("warmup_steps", "seed"):
            _whole(name, getattr(self, name), at_least=0)
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(f"seq_len {self.seq_len} is longer than the model's context of {self.model.max_seq_len}.")
        for name in ("lr", "eps", "max_grad_norm", "spike_nats", "distil_temperature"):
            value = getattr(self, name)
            optional = name in ("max_grad_norm", "spike_nats")
            if value is None and optional:
                continue
            if not isinstance(value, float | int) or not 0 < value < float("inf"):
                raise ValueError(f"{name} {value} must be a number above 0{' or None' if optional else ''}.")
        for name, value in (("min_lr_share", self.min_lr_share), *zip(("beta1", "beta2"), self.betas, strict=True)):
            if not 0 <= value <= 1 or (name != "min_lr_share" and value == 1):
                raise ValueError(f"{name} {value} is outside 0 .. 1.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay {self.weight_decay} must be a number of at least 0.")
        for name, choices in (("precision", PRECISIONS), ("activation_checkpointing", MODES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(choices)}.")
        if not 0 <= self.distil_share <= 1:
            raise ValueError(f"distil_share {self.distil_share} is outside 0 .. 1.")
        if self.compile and self.distil_share:
            raise ValueError("compile would begin anew for what a teacher says of every batch: use one of the two.")
        if self.compile and self.documents:
            raise ValueError("compile would begin anew for the documents, or conversations, of every batch: use one.")
        if self.compile and self.activation_checkpointing != "none":
            raise ValueError("compile does not see through activation checkpointing: use one of the two.")
        if self.qlora and self.lora is None:
            raise ValueError(
                "qlora trains adapters beside a base in 4 bits, which cannot learn itself: give lora, too."
            )
        if self.dpo is not None:
            self._check_preference()
        _ = self.adapter

    def _check_preference(self) -> None:
        if not (isinstance(self.dpo, float | int) and 0 < self.dpo < float("inf")):
            raise ValueError(f"dpo {self.dpo} must be a number above 0: 0.1 is usual.")
        if self.lora is None:
            raise ValueError("dpo compares with the base, which is the model without its adapters: give lora, too.")
        if self.documents:
            raise ValueError("dpo's windows hold one answer each: leave documents out.")
        if self.lora_dropout:
            raise ValueError(
                "dpo weighs the answers in a pass of its own, which would drop other inputs than the pass that learns: "
                "leave lora_dropout out."
            )
        if self.model.moe or self.distil_share:
            raise ValueError(
                "dpo has its own loss, which knows neither routers' losses nor a teacher's: leave one out."
            )

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapters that are trained; None if the whole model is. ValueError for what cannot be."""
        if self.lora is None:
            return None
        targets = tuple(each.strip() for each in self.target.split(","))
        return LoraConfig(self.lora, targets, self.alpha, self.rslora, self.lora_dropout)

    @property
    def tokens_per_step(self) -> int:
        """Tokens one rank computes per step."""
        return self.accumulate * self.batch_size * self.seq_len

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "TrainConfig":
        """The inverse of `to_json`, also after a trip through JSON. Raises ValueError, TypeError or KeyError."""
        nested = {"rope_scaling": RopeScaling, "moe": MoEConfig}
        parts = {name: kind(**raw["model"][name]) for name, kind in nested.items() if raw["model"].get(name)}
        return cls(**raw | {"model": ModelConfig(**raw["model"] | parts), "betas": tuple(raw["betas"])})

    def difference(self, other: "TrainConfig") -> str | None:
        """The first setting in which `other` differs, as a phrase like "lr 0.001, not 0.003"; None if equal."""
        for mine, theirs in ((self.model, other.model), (self, other)):
            for field in fields(mine):
                ours, others = getattr(mine, field.name), getattr(theirs, field.name)
                if ours != others and field.name != "model":
                    return f"{field.name} {ours}, not {others}"
        return None


def _whole(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} {value!r} must be a whole number of at least {at_least}.")
