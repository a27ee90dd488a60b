"""The training loop over several ranks: the same step as one process with all their tokens, and one decision."""

import functools
import math

import numpy as np
import pytest
import torch

from minillm.comm import launch
from minillm.data import Tokens
from minillm.data.loader import Batch
from minillm.measure import ledger
from minillm.model import ModelConfig
from minillm.model.loss import IGNORE
from minillm.parallel import BucketedDDP, FlatDDP, NaiveDDP
from minillm.train import Hybrid, ParallelConfig, TrainConfig, Trainer
from minillm.train.strategies.hybrid import make_strategy

MODEL = ModelConfig(50, 16, 32, 2, 4, 2, max_seq_len=16, tie_embeddings=True)


def trainer(batches, accumulate, parallel=None, **options):
    config = TrainConfig(MODEL, seq_len=16, batch_size=2, steps=4, lr=1e-2, accumulate=accumulate, **options)
    tokens = Tokens((np.arange(500) % 50).astype(np.uint16), 50, 0, 1, 1500)
    trainer = Trainer(config, tokens, workers=0, parallel=parallel)
    trainer.loader.close()
    trainer.loader = Given(batches, trainer.loader.dataset)
    return trainer


class Given:
    position = 0

    def __init__(self, batches, dataset):
        self.batches, self.dataset = iter(batches), dataset

    def __next__(self):
        return Batch(*next(self.batches), None, 0)

    def close(self):
        pass


def uneven(count):
    """Batches of which the later ones have fewer and fewer tokens that count; the last has none."""
    draw = torch.Generator().manual_seed(3)
    batches = []
    for index in range(count):
        inputs, targets = torch.randint(50, (2, 2, 16), generator=draw)
        targets[torch.rand(2, 16, generator=draw) < index / (count - 1)] = IGNORE
        batches.append((inputs, targets))
    return batches


def bits(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def loops(group):
    torch.set_num_threads(1)
    batches, n = uneven(4 * group.world_size), group.world_size
    replicas = ParallelConfig(dp=n)
    share = [batches[4 * group.rank : 4 * group.rank + 4], batches[group.rank :: n]]  # one rank may have few tokens
    small = functools.partial(BucketedDDP, bucket_cap_mb=4 / 1024)
    for wrap, mine, checkpointing in (
        (small, share[0], "full"),
        (NaiveDDP, share[1], "none"),
        (FlatDDP, share[0], "none"),
    ):
        # Four microbatches on each rank against 4n of one process.
        options = {"activation_checkpointing": checkpointing}
        with (
            trainer(mine, 4, Hybrid(group, replicas, wrap_with=wrap), **options) as ours,
            trainer(batches, 4 * n) as alone,
        ):
            with ledger() as led:
                (loss, tokens), (expected_loss, expected_tokens) = ours.backward(), alone.backward()
                for (name, a), b in zip(ours.model.named_parameters(), alone.model.parameters(), strict=True):
                    assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6), name
                norm, expected_norm = ours.finish_gradients(), alone.finish_gradients()
                ours.update(1e-2)
            assert math.isclose(loss, expected_loss, rel_tol=1e-5) and tokens == expected_tokens
            assert math.isclose(norm, expected_norm, rel_tol=1e-4)
            assert led.calls["all_reduce"] == len(ours.module.reducer.buckets) + 2  # tokens, loss
            assert len(set(group.gather_objects(bits(ours.model)))) == 1

    parallel = Hybrid(group, replicas)
    assert (
        parallel.least([group.rank > 0, 3 + group.rank]) == [0, 3]
        and parallel.least([True, 5]) == [1, 5]
        and parallel.least([False, 1]) == [0, 1]
    )

    # One rank's gradient overflows: nobody steps, everybody halves the scale, and the next step is taken by all.
    with trainer(share[1], 1, Hybrid(group, replicas, wrap_with=small), precision="fp16-master") as ours:
        before, norm = bits(ours.model), ours.model.norm.weight
        spoil = norm.register_hook(lambda g: g * math.inf) if group.rank == 1 else None
        scale = ours.scaler.value
        step = ours.step()
        assert not step.applied and ours.scaler.value == scale / 2 and bits(ours.model) == before
        if spoil:
            spoil.remove()
        assert ours.step().applied and bits(ours.model) != before
        assert len(set(group.gather_objects((bits(ours.model), ours.scaler.value)))) == 1
    return "done"


def test_the_loop_takes_the_step_of_one_process_and_one_decision():
    assert launch(loops, 2) == ["done", "done"]


def validations(group):
    """17 windows on two ranks: in the last batch the second rank has none, and takes part all the same."""
    torch.set_num_threads(1)
    config = TrainConfig(MODEL, seq_len=16, batch_size=2, steps=1)
    tokens = Tokens((np.arange(500) % 50).astype(np.uint16), 50, 0, 1, 1500)
    held_out = Tokens((np.arange(17 * 16 + 1) * 7 % 50).astype(np.uint16), 50, 0, 1, 900)
    with Trainer(config, tokens, held_out, workers=0) as alone:
        expected = alone.validate()
    for stage in (0, 2, 3):
        layout = ParallelConfig(dp=2, zero=stage)
        with Trainer(config, tokens, held_out, workers=0, parallel=make_strategy(group, layout)) as ours:
            found = ours.validate()
        assert found.tokens == expected.tokens == 17 * 16
        assert math.isclose(found.loss, expected.loss, rel_tol=1e-5)
    return "done"


def test_validation_runs_the_same_number_of_forwards_on_every_rank():
    assert launch(validations, 2) == ["done", "done"]


def compiled(group):
    """Losses of two steps, and the names of what is saved, without and with compile, by ZeRO stage."""
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="eager")
    tokens, found = Tokens((np.arange(500) % 50).astype(np.uint16), 50, 0, 1, 1500), {}
    for stage in (0, 1, 3):
        for choice in (False, True):
            config = TrainConfig(MODEL, seq_len=16, batch_size=2, steps=4, compile=choice)
            parallel = Hybrid(group, ParallelConfig(dp=2, zero=stage))
            with Trainer(config, tokens, workers=0, parallel=parallel) as ours:
                found[stage, choice] = [ours.step().loss for _ in range(2)], list(ours.local_state().tensors)
    return found


def compiled_parts(group):
    """Losses of two steps of a pipeline without and with compile, and why a model that sends inside cannot have it."""
    torch.set_num_threads(1)
    torch.compile = functools.partial(torch.compile, backend="eager")
    tokens, losses = Tokens((np.arange(500) % 50).astype(np.uint16), 50, 0, 1, 1500), []
    for choice in (False, True):
        config = TrainConfig(MODEL, seq_len=16, batch_size=4, steps=4, compile=choice)
        layout = ParallelConfig(pp=2, zero=3, accumulate=2, reshard=False)
        with make_strategy(group, layout) as parallel, Trainer(config, tokens, workers=0, parallel=parallel) as ours:
            losses.append([ours.step().loss for _ in range(2)])
    for layout in (ParallelConfig(tp=2), ParallelConfig(cp=2)):
        with make_strategy(group, layout) as parallel, pytest.raises(ValueError, match="messages inside a block"):
            Trainer(config, tokens, workers=0, parallel=parallel)
    return losses


def test_compiled_parts_of_a_pipeline_are_the_same_run():
    for without, with_compile in launch(compiled_parts, 2):
        assert without == with_compile


def test_compiled_replicas_and_shards_are_the_same_run():
    for rank in launch(compiled, 2):
        assert all(rank[stage, True] == rank[stage, False] for stage in (0, 1, 3))
