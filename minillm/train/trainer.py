"""Training, one step at a time, on one device or under any strategy.

    input      accumulate microbatches
    forward    sum of token losses / tokens of the whole step     } for each microbatch: gradients add up to those of
    backward   gradients add up                                   } the big batch, however tokens are spread
    optimizer  unscale, norm, clip, AdamW with this step's learning rate

The head's gradient is worked out with the loss, so its two matmuls count as forward time (`model/loss.py`). The host
reads from the device once per step, before the update (loss, tokens, norm), and does not wait for it again: on a GPU
the times of a step's parts are read in the next one, when they are known.

`Trainer.step` does that and says how long each part took; `state_dict` is all the next step depends on, so a run that
is saved and loaded goes on with the same bits. `run.fit` makes a run of it: bar, metrics, checkpoints, Ctrl-C.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.adapters.attach import adapted_kinds, without_dropout
from minillm.adapters.dropout import window_keys
from minillm.adapters.start import BaseFolder, Start
from minillm.data import Batch, Conversations, Loader, Preferences, Tokens, dataset_of
from minillm.measure import Ledger, ledger, span
from minillm.model import Transformer, check_tokens
from minillm.model.compiler import check_compiler, compile_blocks
from minillm.model.loss import IGNORE
from minillm.model.moe import forget_load, update_balance_biases
from minillm.parallel.sharding.full_state import full_state, parts_of_full
from minillm.parallel.sharding.placement import clip_, gradients_of
from minillm.parallel.sharding.state import LocalState
from minillm.predict.model import causal_context, training_flops
from minillm.predict.training.adapters import Adapters
from minillm.train.activation_checkpointing import MODES, checkpoint_blocks
from minillm.train.checkpoint.generators import generator_states, restore_generators
from minillm.train.config import TrainConfig
from minillm.train.fault_tolerance.loss_spike import LossSpikeGuard
from minillm.train.optimizer import adamw, learning_rate
from minillm.train.precision import PRECISIONS, LossScaler
from minillm.train.preference import Preference
from minillm.train.steptime import Step, StepTime
from minillm.train.strategies.single_device import Microbatch, SingleDevice
from minillm.train.teacher import Teacher
from minillm.train.validation import Validation, validate

PROGRESS = ("config", "windows_per_step", "step", "loader", "loss_spikes", "scaler")


class Trainer:
    """`Trainer(config, tokens).step()`, as often as you like.

    validation: held-out tokens for `validate`. device: None = the one of `parallel`'s group, or the CPU.
    peak_flops: of all that the ranks run on, FLOP/s, for the MFU.
    time_parts: keep a ledger, for the parts of `Step.time`; on a GPU, where each collective then records events of the
        device, a step's `time` is that of the step before. False: no ledger, and only the whole step's seconds.
    teacher: a trained model whose next-token distributions are learnt as well (config.distil_share), whole on every
    rank; it is not changed. base: the folder that training starts from, if it does not start from the seed. parallel:
    see strategies/single_device.py. `model` is the bare transformer, `module` what forward is called on.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokens: Tokens | Conversations | Preferences,
        validation: Tokens | Conversations | None = None,
        *,
        device: torch.device | str | None = None,
        peak_flops: float | None = None,
        parallel: SingleDevice | None = None,
        workers: int = 1,
        teacher: Transformer | None = None,
        time_parts: bool = True,
        base: BaseFolder | None = None,
    ):
        self.parallel, self.precision = parallel or SingleDevice(), PRECISIONS[config.precision]
        group = self.parallel.group
        self.device = torch.device(device or ("cpu" if group is None else group.device))
        self.config, self.peak_flops = config, peak_flops
        self._config = config.to_json()
        if tokens.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"tokens of a vocabulary of {tokens.vocab_size} do not fit the model's {config.model.vocab_size}."
            )
        self.positions = self.parallel.positions(config.seq_len)
        if isinstance(tokens, Conversations) and not config.documents:
            raise ValueError("conversations share windows, and each has to see itself alone: set documents=True.")
        if (config.dpo is not None) != isinstance(tokens, Preferences):
            raise ValueError("dpo learns from pairs of answers, and pairs are learnt by dpo: give both or neither.")
        dataset = dataset_of(tokens, config.seq_len, self.positions)
        self.counts_all = isinstance(tokens, Tokens)  # prompts of conversations count in no loss, and yet are computed
        if teacher is None and config.distil_share:
            raise ValueError(f"distil_share {config.distil_share} is of a teacher's loss: give a teacher.")
        self.teacher = None if teacher is None else Teacher(teacher, config, dataset, self.device)
        rank, world_size = self.parallel.rank, self.parallel.world_size
        self.loader = Loader(dataset, config.batch_size, rank, world_size, config.seed, workers=workers)
        self.held_out = validation
        how = {"seed": config.seed, "device": self.device, "dtype": self.precision.weights}
        start = Start(base, config.adapter, config.qlora)
        self.model = self.parallel.build(config.model, start=start, **how)
        checkpoint_blocks(self.model, MODES[config.activation_checkpointing])
        if config.compile:
            if self.parallel.sends_inside_blocks:
                raise ValueError("compile does not look through the messages inside a block: leave out tp, cp and ep.")
            check_compiler(self.device)
            compile_blocks(self.model)
        self.module = self.parallel.wrap(self.model, self.precision.master)
        make = partial(adamw, config=config)
        self.preference = None if config.dpo is None else Preference(config.dpo, self.module, self.model)
        self.updater = self.parallel.updater(self.module, make, self.precision.master)
        self.optimizer = self.updater if isinstance(self.updater, torch.optim.Optimizer) else self.updater.inner
        self.scaler = LossScaler(self.precision.scaled)
        self.loss_spikes = LossSpikeGuard(self._learnt, self._unlearn, spike_nats=config.spike_nats)
        self.time_parts = time_parts
        self._unread: tuple[Ledger, float] | None = None  # of the step before, on a GPU
        self.steps_done = 0
        self.loads = 0  # how often a state was loaded: what was worked out about the one before no longer holds

    def step(self) -> Step:
        """One update from the next `accumulate` microbatches, or one rollback if they went wrong."""
        number, lr, scale = self.steps_done, learning_rate(self.steps_done, self.config), self.scaler.value
        start, position, skipped = time.monotonic(), self.loader.position, None
        with ledger() if self.time_parts else nullcontext() as led:
            loss, tokens = self.backward()
            norm = self.finish_gradients()
            loss, tokens, norm = torch.stack([loss, tokens, norm.to(loss)]).tolist()
            finite = math.isfinite(norm)
            overflow = self.scaler.enabled and not finite  # of half precision: expected now and then
            problem = self.loss_spikes.problem(loss, 0.0 if overflow else norm)
            if problem is None:
                self.loss_spikes.before_update(number, position)
                self.update(lr, finite)
                self.steps_done += 1
            else:
                self.updater.zero_grad()
                self.steps_done = self.loss_spikes.roll_back(problem, number, position, self.loader.position)
                skipped = self.loss_spikes.skipped[-1]
                problem = f"{problem}; back to step {self.steps_done}, without windows {skipped[0]} to {skipped[1] - 1}"
        spent = self._time_of(led, time.monotonic() - start)
        if not self.counts_all:
            tokens = self.parallel.world_size * self.config.tokens_per_step * (1 if self.config.dpo is None else 2)
        mfu = self._mfu(tokens, spent.total)
        happened = (finite and not problem, problem, position, skipped)
        return Step(number, loss, norm, lr, round(tokens), spent, mfu, scale, *happened)

    def backward(self) -> tuple[Tensor, Tensor]:
        """Gradients of the mean loss over all tokens of the step; returns that loss and the number of tokens, both
        scalars in float64 on the device."""
        forget_load(self.model)
        with span("input", "input"):
            batches = [self._to_device(next(self.loader)) for _ in range(self.config.accumulate)]
            weight = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum().float()
        if self.preference:
            with self._computing("forward"):
                batches, losses, weight = self.preference.weighted(batches)
        loss_divisor = self.parallel.loss_divisor(weight)
        total = self.parallel.forward_backward(self.module, batches, loss_divisor, self._computing, self.scaler.scale)
        total = losses if self.preference else total
        weight = (loss_divisor * self.parallel.averaged_over).double()
        return self.parallel.sum(total).double() / weight, weight

    def finish_gradients(self) -> Tensor:
        """Makes the gradients ready for the optimizer: in float32, unscaled and clipped. Returns the norm of the whole
        model's before clipping, a scalar on the device. An overflow on any rank shows in it on all of them."""
        with span("optimizer", "optimizer"):
            self.parallel.prepare_gradients()
            stepped = self.updater.parameters
            self.scaler.unscale_(stepped)
            norm = self.parallel.grad_norm(stepped)
            clip_(gradients_of(stepped), norm, self.config.max_grad_norm)
            return norm

    def update(self, lr: float, finite: bool = True) -> None:
        """Moves the weights, unless loss scaling overflowed, and drops the gradients."""
        with span("optimizer", "optimizer"):
            if finite:
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.updater.step()
                if self.config.model.moe and self.config.lora is None:  # with adapters the base stays as it is
                    update_balance_biases(self.model, self.parallel.sum)
            self.scaler.update(finite)
            self.updater.zero_grad()

    def validate(self, max_tokens: int | None = None) -> Validation:
        """Loss on the held-out tokens: on all of them, or on evenly spread windows of about max_tokens in all."""
        if self.held_out is None:
            raise ValueError("there is nothing to validate on: give Trainer(..., validation=tokens).")
        dataset = dataset_of(self.held_out, self.config.seq_len, self.positions)
        with self.precision.context(self.device), without_dropout(self.model):
            documents = self.config.documents or isinstance(self.held_out, Conversations)
            how = {"parallel": self.parallel, "documents": documents}
            return validate(self.module, dataset, self.config.batch_size, max_tokens, self.device, **how)

    def progress(self) -> dict[str, Any]:
        """How far the run is, as JSON has it: all that the next step depends on but tensors and generators."""
        return {
            "config": self._config,
            "windows_per_step": self.windows_per_step,
            "step": self.steps_done,
            "loader": self.loader.state_dict(),
            "loss_spikes": self.loss_spikes.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def check(self, progress: dict[str, Any]) -> None:
        """Raises ValueError if `progress` is of another configuration, its steps differ, or something is missing."""
        if missing := [name for name in PROGRESS if name not in progress]:
            raise ValueError(f"the checkpoint lacks {', '.join(missing)}: restore it, or start another run.")
        config = progress["config"] | {"accumulate": self.config.accumulate}  # follows from the number of ranks
        if difference := TrainConfig.from_json(config).difference(self.config):
            raise ValueError(f"the checkpoint was trained with {difference}: use the same settings or another run.")
        if (windows := progress["windows_per_step"]) != self.windows_per_step:
            raise ValueError(
                f"the checkpoint's steps have {windows} windows, these {self.windows_per_step}: choose ranks, "
                f"batch_size and accumulate that make {windows}."
            )

    def resume_at(self, progress: dict[str, Any]) -> None:
        """The inverse of `progress`, on any number of ranks that share a step's windows as evenly. ValueError, and
        nothing has changed, for another configuration or other data."""
        self.check(progress)
        self.loader.load_state_dict(progress["loader"])
        self.loss_spikes.load_state_dict(progress["loss_spikes"])
        self.scaler.load_state_dict(progress["scaler"])
        self.steps_done = progress["step"]
        self.loads += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, whole, on every rank; plain containers, tensors and numbers."""
        whole = full_state(self.local_state(), self.parallel.group)
        return {**self.progress(), "generators": generator_states(self.device)(), **whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. ValueError, and nothing has changed, if that was with another configuration
        or other data, or if its tensors or its optimizer are of another model."""
        self.check(state)
        local = self.local_state()
        parts, numbers = parts_of_full(local, state["optimizer"], state["model"], "the state")
        self.resume_at(state)
        local.load_parts(parts, numbers)
        restore_generators(state["generators"], self.device)

    @property
    def windows_per_step(self) -> int:
        """Windows of a step over all ranks, which define a step however many ranks compute it."""
        return self.config.accumulate * self.config.batch_size * self.parallel.world_size

    def close(self) -> None:
        """Ends the loader's threads."""
        self.loader.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def local_state(self) -> LocalState:
        """What this rank has of the weights and of the optimizer's state."""
        return LocalState(self.updater, self.parallel, self.precision.weights)

    def _learnt(self) -> dict[str, Any]:
        """What updates change, and rollbacks restore, of this rank."""
        local = self.local_state()
        return {
            "tensors": local.tensors,
            "numbers": local.numbers(of_empty_parts=True),
            "scaler": self.scaler.state_dict(),
        }

    def _unlearn(self, state: dict[str, Any]) -> None:
        self.local_state().load_parts(state["tensors"], state["numbers"])
        self.scaler.load_state_dict(state["scaler"])
        self.loads += 1

    def _to_device(self, batch: Batch) -> Microbatch:
        check_tokens(batch.inputs, self.config.model)
        config, indices = self.config, batch.indices
        documents = self._copy(self.loader.dataset.documents(indices)) if config.documents else None
        goals = partial(self.teacher.goals, batch, documents) if self.teacher and config.distil_share else None
        keys = self._copy(window_keys(config.seed, self.steps_done, indices)) if config.lora_dropout else None
        return Microbatch(self._copy(batch.inputs), self._copy(batch.targets), None, documents, goals, keys)

    def _copy(self, x: Tensor) -> Tensor:
        """x on the device. To a GPU from pinned memory, of which torch keeps what a finished copy has left: a copy of
        ordinary memory would make the host wait for all that it has queued."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    @contextmanager
    def _computing(self, name: str) -> Iterator[None]:
        """Forward, or all of a pipeline, in the precision of this run; backward as its forward was."""
        with span(name), nullcontext() if name == "backward" else self.precision.context(self.device):
            yield

    def _time_of(self, led: Ledger | None, total: float) -> StepTime:
        """On a GPU of the step before: the device has long got there, since this step's loss was read."""
        if led is None:
            return StepTime(total)
        if self.device.type == "cpu":
            return StepTime.of(led, total)
        before, self._unread = self._unread, (led, total)
        return StepTime.of(*before) if before else StepTime(total)

    def _mfu(self, tokens: float, seconds: float) -> float | None:
        if self.peak_flops is None:
            return None
        model = self.config.model
        context = causal_context(self.config.seq_len, model.sliding_window)
        if self.config.lora is None:
            flops = training_flops(model, context).total
        else:
            layers = adapted_kinds(model, self.config.adapter)
            flops = Adapters(model, self.config.lora, layers).training_flops(context).total
        return tokens * flops / seconds / self.peak_flops
