"""The loop against independent references: the fp64 oracle, a plain torch loop, the big batch."""

import dataclasses
import functools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.data import TokenDataset, Tokens
from minillm.data.loader import Batch
from minillm.equivalence import Batch as OracleBatch
from minillm.equivalence import reference
from minillm.measure.ledger import Event, Ledger, Span, open_ledgers
from minillm.model import ModelConfig, Transformer
from minillm.model.loss import IGNORE
from minillm.predict.model import training_flops
from minillm.train import LossSpikeGuard, StepTime, TrainConfig, Trainer, decay_groups, learning_rate

MODEL = ModelConfig(50, 32, 64, 2, 4, 2, max_seq_len=16, tie_embeddings=True, qkv_bias=True)


def text(count=2000, seed=0):
    """Tokens with a pattern to learn: each is the one before plus 1 or 2."""
    steps = np.random.default_rng(seed).integers(1, 3, count)
    return Tokens((np.cumsum(steps) % 50).astype(np.uint16), 50, 0, 1, 3 * count)


def config(**options):
    options = {"seq_len": 16, "batch_size": 4, "steps": 12, "warmup_steps": 2, "lr": 1e-2} | options
    return TrainConfig(MODEL, **options)


def trainer(tokens=None, **options):
    return Trainer(config(**options), text() if tokens is None else tokens, text(300, seed=1), workers=0)


class Fixed:
    """A loader of given batches, some of whose targets do not count."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __next__(self):
        return Batch(*next(self.batches), None, 0)

    def close(self):
        pass


def uneven_batches(count):
    draw = torch.Generator().manual_seed(3)
    batches = []
    for index in range(count):
        inputs, targets = torch.randint(50, (2, 4, 16), generator=draw)
        targets[torch.rand(4, 16, generator=draw) < 0.2 + 0.6 * index / count] = IGNORE
        batches.append((inputs, targets))
    return batches


@pytest.mark.parametrize("count", [1, 3])
def test_accumulated_gradients_are_the_oracles(count):
    """Microbatches with unequal numbers of tokens give the gradient of the whole batch in one process, in float64."""
    batches = uneven_batches(count)
    whole = OracleBatch(*(torch.cat(part) for part in zip(*batches, strict=True)))
    expected = reference(MODEL, whole, max_grad_norm=0.5)
    run = trainer(accumulate=count, max_grad_norm=0.5)
    run.loader = Fixed(batches)
    run.model.double()
    loss, tokens = run.backward()
    assert tokens == (whole.targets != IGNORE).sum()
    assert loss == pytest.approx(expected.loss, rel=1e-6)  # reported in float32
    for name, parameter in run.model.named_parameters():
        assert torch.allclose(parameter.grad, expected.gradients[name], rtol=0, atol=1e-12), name
    norm = run.finish_gradients()
    assert norm == pytest.approx(expected.grad_norm, rel=1e-6)
    for name, parameter in run.model.named_parameters():
        clipped = expected.gradients[name] * 0.5 / expected.grad_norm
        assert torch.allclose(parameter.grad, clipped, rtol=1e-5, atol=1e-12), name


def test_mean_of_means_would_be_wrong():
    """What the test above would let through if tokens were spread evenly."""
    batches = uneven_batches(3)
    whole = OracleBatch(*(torch.cat(part) for part in zip(*batches, strict=True)))
    means = [reference(MODEL, OracleBatch(*batch)).loss for batch in batches]
    assert abs(sum(means) / 3 - reference(MODEL, whole).loss) > 1e-4


def plain_torch_losses(settings, steps):
    """The same training written with torch's own parts only."""
    model = Transformer(MODEL, seed=settings.seed)
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embedding" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=settings.betas, eps=settings.eps, foreach=False)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / settings.warmup_steps, 1, settings.warmup_steps - 1)
    dataset, losses = TokenDataset(text(), 16), []
    loader = trainer(batch_size=4 * settings.accumulate).loader
    for step in range(steps):
        inputs, targets = dataset.batch(next(loader).indices)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        share = (step - settings.warmup_steps) / (settings.steps - 1 - settings.warmup_steps)
        factor = warm.get_last_lr()[0] if share < 0 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * factor
        optimizer.step()
        optimizer.zero_grad()
        if share < 0:
            for group in optimizer.param_groups:
                group["lr"] = factor
            warm.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_a_plain_torch_run(accumulate):
    run = trainer(accumulate=accumulate, max_grad_norm=0.7)
    losses, model = plain_torch_losses(run.config, 12)
    ours = [run.step() for _ in range(12)]
    assert [step.loss for step in ours] == pytest.approx(losses, abs=2e-5)
    assert ours[-1].loss < 0.8 * ours[0].loss  # it learns
    for (name, mine), other in zip(run.model.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=2e-4), name
    assert all(step.applied and step.tokens == 64 * accumulate for step in ours)


def test_only_matrices_decay():
    named = dict(Transformer(ModelConfig(50, 32, 64, 1, 4, qkv_bias=True)).named_parameters())
    decayed, kept = decay_groups(named.items(), 0.1)
    names = {id(parameter): name for name, parameter in named.items()}
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "head",
    }  # fmt: skip
    kept_names = {names[id(p)] for p in kept["params"]}
    assert {"embedding.weight", "norm.weight", "blocks.0.attention.q_proj.bias"} <= kept_names
    assert len(decayed["params"]) + len(kept["params"]) == len(named)


def test_learning_rate():
    settings = config(steps=11, warmup_steps=4, lr=1.0)
    rates = [learning_rate(step, settings) for step in range(11)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55) and rates[10] == pytest.approx(0.1)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    assert learning_rate(0, config(warmup_steps=0, lr=1.0)) == 1.0


@pytest.mark.drawn(3)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-master", "fp16-master"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_lower_precision_learns_the_same(precision, checkpointing):
    full, run = trainer(), trainer(precision=precision, activation_checkpointing=checkpointing)
    exact = [full.step().loss for _ in range(12)]
    losses = [run.step() for _ in range(12)]
    assert [step.loss for step in losses] == pytest.approx(exact, abs=0.15)
    if run.scaler.enabled:
        assert losses[0].loss_scale == 2.0**16


def test_bf16_without_masters_falls_behind():
    """With updates far below a weight's 2^-8, most are lost: masters move, pure weights stand still."""
    moved = {}
    for precision in ("bf16-master", "bf16-pure"):
        run = trainer(precision=precision, lr=1e-5, warmup_steps=0, weight_decay=0.0)
        before = {name: p.clone() for name, p in run.model.named_parameters()}
        for _ in range(12):
            run.step()
        norms = [
            torch.equal(p, before[name]) for name, p in run.model.named_parameters() if name.endswith("norm.weight")
        ]
        moved[precision] = (all(norms), run.updater.master_weights is not None)
        if run.updater.master_weights:
            drift = [(m - p.float()).abs().max() for m, p in zip(run.updater.parameters, before.values(), strict=True)]
            assert min(drift) > 0
    assert moved == {"bf16-master": (True, True), "bf16-pure": (True, False)}


def test_an_overflow_skips_the_update_and_halves_the_scale():
    run = trainer(precision="fp16-master")
    run.scaler.value = 2.0**60
    before = [p.clone() for p in run.model.parameters()]
    step = run.step()
    assert not step.applied and step.rollback is None and run.scaler.value == 2.0**59
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert run.steps_done == 1


def test_a_bad_update_is_rolled_back_and_its_data_skipped():
    run = trainer(steps=40, spike_nats=1.0)
    run.loss_spikes.every = 5
    for _ in range(8):
        run.step()
    snapshot = run.loss_spikes._snapshot[1]["tensors"]["model/blocks.0.mlp.up_proj.weight"].clone()
    with torch.no_grad():
        run.model.norm.weight.mul_(-20)  # what a bad update leaves behind
    position = run.loader.position
    step = run.step()
    assert not step.applied and "back to step 5" in step.rollback and run.steps_done == 5
    assert run.loader.position > position
    assert torch.equal(run.model.blocks[0].mlp.up_proj.weight, snapshot)
    after = [run.step() for _ in range(10)]
    assert all(s.applied for s in after) and [s.step for s in after] == list(range(5, 15))
    with torch.no_grad():
        run.model.norm.weight.fill_(math.nan)
    assert "the loss is nan" in run.step().rollback
    assert run.step().applied


def test_unless_it_is_asked_for_nothing_is_copied_and_a_bad_loss_ends_the_run():
    run = trainer()
    captured = []
    run.loss_spikes.capture = lambda: captured.append("a copy")
    for _ in range(3):
        run.step()
    with torch.no_grad():
        run.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the loss is nan, and rolling back is off"):
        run.step()
    assert not captured


def test_a_snapshot_is_copied_into_host_memory():
    spikes = LossSpikeGuard(lambda: {"weight": torch.ones(3, device="meta")}, None, spike_nats=2.0)
    with pytest.raises(NotImplementedError, match="meta"):  # which holds nothing to copy; another device would
        spikes.before_update(0)
    weight = torch.ones(2)
    spikes = LossSpikeGuard(lambda: {"state": (weight, 4)}, None, spike_nats=2.0)
    spikes.before_update(0)
    weight.zero_()
    assert spikes._snapshot[1]["state"][0].tolist() == [1, 1]


class HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors: on a GPU it would wait for the device each time."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "fp16-master"])
def test_a_step_reads_no_single_numbers_from_the_device(monkeypatch, precision):
    """All that the host needs comes in one `tolist` before the update (which is no `_local_scalar_dense`)."""
    monkeypatch.setattr("minillm.train.trainer.check_tokens", lambda *_: None)  # reads the batch on the CPU
    monkeypatch.setattr("minillm.model.transformer.check_tokens", lambda *_: None)  # and does not on a GPU
    run = trainer(accumulate=3, precision=precision)
    with HostReads() as reads:
        run.step()
    assert reads.count == 0


def test_a_snapshot_is_gone_before_the_next_is_taken():
    alive = []
    spikes = LossSpikeGuard(lambda: alive.append(spikes._snapshot) or {}, None, spike_nats=2.0, every=2)
    for step in range(4):
        spikes.before_update(step)
    assert alive == [None, None]


def test_gradients_that_are_not_finite_are_not_applied():
    run = trainer(spike_nats=2.0)
    for _ in range(3):
        run.step()
    handle = run.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    assert "gradient norm" in run.step().rollback
    handle.remove()
    assert run.step().applied


def test_guard_gives_up_with_advice():
    state = [0]
    guard = LossSpikeGuard(lambda: list(state), lambda saved: None, spike_nats=2.0, patience=2)
    with pytest.raises(ValueError, match="very first step"):
        guard.roll_back(guard.problem(math.nan, 0.0))
    assert guard.problem(1.0, 1.0) is None
    guard.before_update(0)
    assert [guard.roll_back("bad") for _ in range(2)] == [0, 0]
    with pytest.raises(ValueError, match="lower --lr"):
        guard.roll_back("bad")


def test_validation_is_the_mean_over_all_windows():
    run = trainer()
    held_out = TokenDataset(text(300, seed=1), 16)
    inputs, targets = held_out.batch(range(len(held_out)))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(run.model(inputs).flatten(0, 1), targets.flatten()).item()
    found = run.validate()
    assert found.loss == pytest.approx(expected, abs=1e-6) and found.tokens == targets.numel()
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / 3, abs=1e-6)  # 3 bytes per token
    assert run.validate(max_tokens=80).tokens == 80
    run.held_out = None
    with pytest.raises(ValueError, match="validation=tokens"):
        run.validate()


def test_parts_of_a_step_add_up():
    run = trainer(accumulate=2)
    time = run.step().time
    parts = [time.input, time.forward, time.backward, time.optimizer]
    assert all(part > 0 for part in parts) and time.communication == 0 and time.idle > 0
    assert sum(parts) + time.communication + time.idle == pytest.approx(time.total)


def test_waiting_for_others_is_communication():
    def event(end, waited):
        return Event("all_reduce", "dp", 8, 1, (2,), "float32", end - 2, end, waited)

    spans = [Span("input", "input", 0, 1), Span("forward", "compute", 1, 3), Span("backward", "compute", 3, 8)]
    spans += [Span("finish", "comm", 8, 9), Span("optimizer", "optimizer", 9, 10), Span("else", "compute", 10, 11)]
    time = StepTime.of(Ledger([event(5, 0.5), event(7, 1.0), event(8.5, 0.5)], spans), 11)
    assert (time.input, time.forward, time.backward, time.optimizer) == (1, 2, 3.5, 1)
    assert (time.communication, time.idle, time.total) == (2.5, 1, 11)


def plainly(events, spans, total):
    """`StepTime.of` by its definition: every event beside every span."""
    kinds = {"forward": "forward", "backward": "backward", "wait": "communication"}
    seconds = dict.fromkeys(("forward", "backward", "communication"), 0.0)
    for each in spans:
        waited = sum(e.waited for e in events if each.start <= e.end <= each.end)
        part = kinds[each.name]
        seconds[part] += each.seconds - (0 if part == "communication" else waited)
        seconds["communication"] += 0 if part == "communication" else waited
    beside = [e for e in events if not any(each.start <= e.end <= each.end for each in spans)]
    return StepTime(total, **seconds | {"communication": seconds["communication"] + sum(e.waited for e in beside)})


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_many_events_and_spans_are_those_of_the_definition(seed):
    draw = random.Random(seed)
    spans, now = [], 0.0
    for name in draw.choices(["forward", "backward", "wait"], k=12):
        start = now + draw.random()
        now = start + draw.random()
        spans.append(Span(name, "wait" if name == "wait" else "compute", start, now))
        if draw.random() < 0.3:
            spans.append(Span("backward", "compute", start + 0.1 * (now - start), now - 0.1 * (now - start)))
    ends = sorted(draw.uniform(0, now + 1) for _ in range(50))
    events = [Event("all_reduce", "world", 0, 0, (), "", end, end, draw.choice([0.0, draw.random()])) for end in ends]
    draw.shuffle(events)
    found, expected = StepTime.of(Ledger(events, spans), 30.0), plainly(events, spans, 30.0)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


def test_a_step_that_is_not_timed_keeps_no_ledger():
    run, open_then = trainer(), []
    quiet = Trainer(config(), text(), workers=0, time_parts=False)
    for each in (run, quiet):
        update = each.update
        each.update = lambda *given, update=update: (open_then.append(len(open_ledgers())), update(*given))
    timed, untimed = run.step(), quiet.step()
    assert open_then == [1, 0] and timed.loss == untimed.loss
    assert timed.time.forward > 0 and untimed.time.idle == untimed.time.total > 0
    assert "forward_s" in timed.to_json() and "forward_s" not in untimed.to_json() and untimed.to_json()["seconds"] > 0


class Late:
    """A moment of a device, which to read makes the host wait until the device gets there."""

    def __init__(self, at, reads):
        self.at, self.reads = at, reads

    def seconds(self):
        self.reads.append(self.at)
        return self.at


def test_on_a_gpu_a_step_s_times_are_read_in_the_next_step():
    """Its host has waited for the device then, for the loss, so a step waits once."""
    run, reads = trainer(), []
    run.device = torch.device("cuda")
    ledgers = [Ledger(spans=[Span("forward", "compute", Late(at, reads), Late(at + 2, reads))]) for at in (5, 10)]
    first = run._time_of(ledgers[0], 3.0)
    assert reads == [] and (first.total, first.idle) == (3.0, 3.0)
    second = run._time_of(ledgers[1], 4.0)
    assert reads == [5, 7] and (second.total, second.forward) == (3.0, 2.0)


def test_mfu_counts_useful_flops_only():
    run = Trainer(config(activation_checkpointing="full"), text(), peak_flops=1e9, workers=0)
    step = run.step()
    flops = training_flops(MODEL, 17 / 2).total * 64
    assert step.mfu == pytest.approx(flops / step.time.total / 1e9)
    assert trainer().step().mfu is None


def test_each_block_has_a_compiled_backward_of_its_own(monkeypatch):
    """So that its gradients are there, and are reduced, before the backward of the block before begins. One graph for
    all blocks would return every gradient at its end."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    run, losses, names, seen = trainer(compile=True), [], [], set()
    run.scaler.scale = lambda loss: losses.append(loss) or loss
    run.step()
    following = [losses[0].grad_fn]
    while following:
        node = following.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            following += [each for each, _ in node.next_functions]
    assert names.count("CompiledFunctionBackward") == len(run.model.blocks) > 1


def test_compiled_is_the_same_run(monkeypatch):
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    runs = [trainer(compile=choice) for choice in (False, True)]
    losses = [[run.step().loss for _ in range(2)] for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size 0 must be a whole number of at least 1"),
        ({"lr": -1.0}, "lr -1.0 must be a number above 0"),
        ({"lr": math.nan}, "lr nan"),
        ({"seq_len": 17}, "seq_len 17 is longer than the model's context of 16"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown: use one of fp32"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing 'some' is unknown"),
        ({"betas": (0.9, 1.0)}, "beta2 1.0 is outside"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
        ({"compile": True, "activation_checkpointing": "full"}, "compile does not see through activation"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_bad_data_is_named():
    with pytest.raises(ValueError, match="vocabulary of 51 do not fit the model's 50"):
        trainer(Tokens(np.zeros(100, np.uint16), 51, 0, 1, 100))
    run = trainer(Tokens(np.full(2000, 50, np.uint16), 50, 0, 1, 100))
    with pytest.raises(ValueError, match="token id 50 is outside"):
        run.step()
