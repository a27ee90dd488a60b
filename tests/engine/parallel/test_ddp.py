"""Data parallelism against torch's, against one process with the whole batch, and against its own receipts."""

import contextlib
import hashlib
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minillm.comm import RankError, launch
from minillm.measure import ledger
from minillm.measure.ledger import open_ledgers
from minillm.model import ModelConfig, Transformer
from minillm.parallel import BucketedDDP, FlatDDP, NaiveDDP
from minillm.predict.training import sharding as predict

MODEL = ModelConfig(24, 12, 24, 1, 2, 1, max_seq_len=8, tie_embeddings=True, qkv_bias=True)
KB = 1 / 1024  # in MiB
ROWS, ACCUMULATE = 12, 2


def transformer(seed=0, frozen=True):
    model = Transformer(MODEL, seed=seed, dtype=torch.float64)
    model.blocks[0].mlp.up_proj.weight.requires_grad_(not frozen)
    return model


def batch(step):
    """Tokens and targets of the whole group in one step: [rows, seq]."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(24, (2, ROWS, 8), generator=draw)


def microbatches(step, rank, world_size, accumulate=ACCUMULATE):
    rows = batch(step)[:, rank::world_size]
    return rows.tensor_split(accumulate, dim=1)


def bits(tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def error(got, expected):
    return max(((a - b).norm() / (b.norm() + 1e-300)).item() for a, b in zip(got, expected, strict=True))


def train(module, group, steps, accumulate=ACCUMULATE, set_to_none=True, optimizer=None):
    """Gradients after the last step and weights; torch's habits and nothing else."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        parts = microbatches(step, group.rank, group.world_size, accumulate)
        for index, (inputs, targets) in enumerate(parts):
            with contextlib.nullcontext() if index == len(parts) - 1 else module.no_sync():
                nll, _ = module(inputs, targets=targets)
                (nll / (inputs.numel() * accumulate)).backward()
        gradients.append([p.grad.clone() for p in parameters])
        optimizer.step()
    return gradients, parameters


class Alone:
    rank, world_size = 0, 1


def alone(steps):
    model = transformer()
    model.no_sync = contextlib.nullcontext
    return train(model, Alone, steps)


FORMS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "one bucket": BucketedDDP,
    "small buckets": lambda m, g: BucketedDDP(m, g, bucket_cap_mb=2 * KB, first_bucket_mb=1 * KB),
    "find unused": lambda m, g: BucketedDDP(m, g, bucket_cap_mb=2 * KB, find_unused=True),
}


def against_torch(group):
    """Per form: (error against torch, against one process, rank's bits, buckets, torch's buckets)."""
    torch.set_num_threads(1)
    torchs = DistributedDataParallel(
        transformer(), process_group=group.process_group, bucket_cap_mb=2 * KB, gradient_as_bucket_view=True
    )
    expected, expected_weights = train(torchs, group, 5)
    sizes = torchs._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    single, single_weights = alone(5)
    found = {}
    for (name, wrap), set_to_none in zip(FORMS.items(), itertools.cycle([True, False])):
        module = wrap(transformer(seed=group.rank), group)  # made equal by the wrapper
        gradients, weights = train(module, group, 5, set_to_none=set_to_none)
        found[name] = (
            max(error(a, b) for a, b in zip(gradients, expected, strict=True)),
            max(error(a, b) for a, b in zip(gradients, single, strict=True)),
            max(error(weights, expected_weights), error(weights, single_weights)),
            set(group.gather_objects(bits(module.state_dict().values()))),
            len(module.reducer.buckets),
        )
    module = BucketedDDP(transformer(), group, bucket_cap_mb=2 * KB, first_bucket_mb=2 * KB)
    train(module, group, 2)
    return found, [sum(p.nbytes for p in b.parameters) for b in module.reducer.buckets], sizes


def receipts(group):
    """(bytes, all-reduces, all-reduces begun before the last gradient, names of the calls) of a later step."""
    torch.set_num_threads(1)
    found = {}
    cases = {
        "naive": (NaiveDDP, 1, False),
        "flat": (FlatDDP, 1, False),
        "buckets": (lambda m, g: BucketedDDP(m, g, 2 * KB, 2 * KB), 1, False),
        "large batch": (lambda m, g: BucketedDDP(m, g, 2 * KB, 2 * KB), 1, True),
        "no_sync": (lambda m, g: BucketedDDP(m, g, 2 * KB, 2 * KB), 4, False),
        "find unused": (lambda m, g: BucketedDDP(m, g, 2 * KB, 2 * KB, find_unused=True), 1, False),
    }
    for name, (wrap, accumulate, large) in cases.items():
        model, seen = transformer(frozen=False), []
        last = model.embedding.weight  # tied: its gradient is complete when backward is over
        last.register_post_accumulate_grad_hook(
            lambda p, seen=seen: seen.append(sum(led.calls["all_reduce"] for led in open_ledgers()))
        )
        module = wrap(model, group)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        train(module, group, 1, accumulate, optimizer=optimizer)
        with ledger() as led:
            if large:
                nll, _ = module(*batch(0)[:1], targets=batch(0)[1])
                nll.backward()
            else:
                train(module, group, 1, accumulate, optimizer=optimizer)
        sizes = [b.numel for b in module.reducer.buckets]
        found[name] = (led.bytes(), dict(led.calls), seen[-1], sizes)
    return found


def equalities_and_receipts(group):
    return against_torch(group), receipts(group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_to_torch_and_to_one_process_at_the_predicted_bytes_and_calls(world_size):
    trainable = [p for p in transformer().parameters() if p.requires_grad]
    every = list(transformer().parameters())
    assert all(p.numel() % 6 == 0 for p in every)
    whole = predict.gradient_bytes(sum(p.nbytes for p in every), world_size)
    for rank, (equalities, found) in enumerate(launch(equalities_and_receipts, world_size)):
        forms, ours, torchs = equalities
        assert str(torchs) == ", ".join(map(str, ours)) and len(ours) > 3
        for name, (from_torch, from_single, from_weights, different, _) in forms.items():
            assert from_torch < 1e-12 and from_single < 1e-10 and from_weights < 1e-10, name
            assert len(different) == 1, name  # the same bits on every rank
        assert forms["naive"][-1] == len(trainable) and forms["flat"][-1] == forms["one bucket"][-1] == 1

        buckets = found["buckets"][-1]
        assert len(buckets) == len(predict.bucket_sizes([p.nbytes for p in reversed(every)], 2048)) > 3
        calls = {"naive": len(every), "flat": 1, "buckets": len(buckets), "large batch": len(buckets)}
        calls |= {"no_sync": len(buckets), "find unused": len(buckets) + 1}
        for name, (num_bytes, counted, early, sizes) in found.items():
            exact = predict.all_reduce(sizes, 8, world_size).sent_per_rank[rank]
            flags = predict.all_reduce([len(every)], 1, world_size).sent_per_rank[rank] if name == "find unused" else 0
            assert num_bytes == exact + flags and exact == whole, name
            assert counted == {"all_reduce": calls[name]}, name
            assert early == (0 if name in ("naive", "flat") else len(buckets) - 1), name


class Corners(nn.Module):
    """Two dtypes, a tied, a frozen and a transposed weight, buffers of all kinds, a scalar, a layer that may be
    skipped and one that always is."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.never = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.head = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.head.weight = self.second.weight
        self.single = nn.Parameter(torch.randn(4, dtype=torch.float32))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())
        self.frozen = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mask", torch.rand(5) < 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("table", torch.randn(3, 5).t(), persistent=False)

    def forward(self, x, skip_first, last=0):
        x = x if skip_first else self.first(x)
        x = self.head(torch.tanh(self.second(x) + self.frozen)) * self.single.double() * self.scale
        return (x @ self.turned).square().mean() + last


def corners(group):
    torch.set_num_threads(1)
    inputs = torch.randn(2 * group.world_size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = inputs.tensor_split(group.world_size)
    wraps = [
        lambda m: BucketedDDP(m, group, bucket_cap_mb=0.2 * KB, first_bucket_mb=0.1 * KB, find_unused=True),
        lambda m: NaiveDDP(m, group, find_unused=True),
        lambda m: FlatDDP(m, group, find_unused=True),
        lambda m: DistributedDataParallel(m, process_group=group.process_group, find_unused_parameters=True),
    ]
    found = []
    for wrap in wraps:
        module = wrap(Corners(group.rank))
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        for step in range(3):
            optimizer.zero_grad()
            module(parts[group.rank], skip_first=group.rank == 0 or step == 2).backward()  # step 2: nobody uses it
            optimizer.step()
        single = Corners(0)
        single.load_state_dict(module.module.state_dict())
        loss = sum(single(part, skip_first=rank == 0) for rank, part in enumerate(parts)) / len(parts)
        loss.backward()
        optimizer.zero_grad()
        module(parts[group.rank], skip_first=group.rank == 0).backward()
        for (name, a), b in zip(module.module.named_parameters(), single.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (name.startswith("never") or name == "frozen"), name
            assert a.grad is None or error([a.grad], [b.grad]) < (1e-6 if name == "single" else 1e-12), name
            assert a.grad is None or a.grad.stride() == a.stride(), name
        found.append([t.detach().clone() for t in [*module.module.parameters(), *module.module.buffers()]])
        if not isinstance(module, DistributedDataParallel):
            assert all(len({p.dtype for p in b.parameters}) == 1 for b in module.reducer.buckets)
            packed = [p for b in module.reducer.buckets for p in b.parameters]
            assert len(packed) == len({id(p) for p in packed}) == 9
            optimizer.zero_grad()  # nobody uses it: no gradient, not zeros
            module(parts[group.rank], skip_first=True).backward()
            assert module.module.first.weight.grad is None and module.module.scale.grad is not None
            if group.rank == 1:  # this rank's loss reaches no parameter at all
                module(parts[1], True)
            else:
                module(parts[group.rank], True).backward()
            module.finish()
    pairs = [pair for other in found[:-1] for pair in zip(other, found[-1], strict=True)]
    return all(torch.equal(a, b) or error([a], [b]) < 1e-6 for a, b in pairs), bits(found[0])


def test_corners_equal_torch_and_one_process_also_when_a_rank_skips_the_first_layer():
    results = launch(corners, 2)
    assert all(same for same, _ in results) and len({b for _, b in results}) == 1


def refusals(group):
    """The sentences with which bad input is refused, none of which may hang."""
    said = []

    def refuse(make):
        try:
            make()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("accepted")

    second = nn.Linear(3, 4 if group.rank == 0 else 5)
    refuse(lambda: BucketedDDP(nn.Sequential(nn.Linear(3, 3), second), group))
    refuse(lambda: NaiveDDP(nn.Linear(3, 3, bias=group.rank == 0), group))
    refuse(lambda: FlatDDP(nn.Linear(3, 3).requires_grad_(group.rank == 0), group))
    refuse(lambda: BucketedDDP(nn.Linear(3, 3, dtype=(torch.float32, torch.float64)[group.rank]), group))
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb": -1}, {"first_bucket_mb": 0}, {"bucket_cap_mb": math.nan}):
        refuse(lambda options=options: BucketedDDP(nn.Linear(3, 3), group, **options))
    refuse(lambda: BucketedDDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), group))
    # Unused on rank 1 only, in the first step: every rank is told.
    pair = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    pair.forward = lambda x, use: pair[1](x) if use else pair[0](x) + pair[1](x)
    module = BucketedDDP(pair, group, bucket_cap_mb=0.01 * KB)
    refuse(lambda: module(torch.ones(1, 3), group.rank == 1).sum().backward())
    module(torch.ones(1, 3), False).sum().backward()  # and it can go on
    embedding = BucketedDDP(nn.Embedding(3, 3, sparse=True), group)
    refuse(lambda: embedding(torch.tensor([1])).sum().backward())
    return said


def test_bad_input_is_named_on_every_rank():
    for said in launch(refusals, 2):
        pieces = [
            "rank 1 has 1.weight [5, 3] torch.float32 where rank 0 has 1.weight [4, 3]",
            "rank 1 has nothing where rank 0 has bias [3]",
            "rank 1 has weight [3, 3] torch.float32 frozen where rank 0 has weight [3, 3] torch.float32:",
            "rank 1 has weight [3, 3] torch.float64 where rank 0 has weight [3, 3] torch.float32",
            "bucket_cap_mb is 0",
            "bucket_cap_mb is -1",
            "first_bucket_mb is 0",
            "bucket_cap_mb is nan",
            "0.weight on cpu, 1.weight on meta",
            "no gradient on rank 1 of group 'world' for 0.weight, 0.bias: use find_unused=True",
            "weight has a sparse gradient",
        ]
        for sentence, piece in zip(said, pieces, strict=True):
            assert piece in sentence


def unused_later(group):
    pair = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    pair.forward = lambda x, use: pair[1](x) if use else pair[0](x) + pair[1](x)
    module = BucketedDDP(pair, group, bucket_cap_mb=0.01 * KB)
    for step in range(3):
        module.zero_grad()
        module(torch.ones(1, 3), group.rank == 1 and step == 2).sum().backward()
    group.barrier()


def test_a_parameter_unused_later_on_one_rank_is_an_error_there_and_no_hang():
    with pytest.raises(RankError, match=r"no gradient on rank 1 .* for 0.weight, 0.bias") as caught:
        launch(unused_later, 2, timeout=20)
    assert caught.value.rank == 1
