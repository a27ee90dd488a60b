"""Training adapters: the base stays, little is saved, a resumed run has the same bits, wrong bases are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm.adapters import LoraConfig
from minillm.adapters.peft_folder import load_peft
from minillm.adapters.start import BaseFolder
from minillm.comm import launch
from minillm.data import Tokens
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.quantize import QuantizedLinear
from minillm.train import TrainConfig, Trainer
from minillm.train.checkpoint.export import export_adapter
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from tests.engine.comm.nccl_like import make_nccl_like_strategy

SHAPE = ModelConfig(64, 64, 128, 2, 4, 2, head_dim=32, max_seq_len=32)  # groups of 64 for two tensor-parallel ranks
TOKENS = Tokens(np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint16), 64, 0, 1, 2000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    save_hf(Transformer(SHAPE, seed=7), path)
    return path


def config_of(folder, **options):
    base = BaseFolder(folder)
    how = {"seq_len": 16, "batch_size": 4, "steps": 20, "warmup_steps": 1, "lr": 1e-2, "lora": 4, "target": "q,v,down"}
    return TrainConfig(base.config, base=base.fingerprint, **how | options)


def trainer_of(folder, config=None, **options):
    return Trainer(config or config_of(folder, **options), TOKENS, TOKENS, base=BaseFolder(folder))


PRECISIONS = ["fp32", "bf16", "bf16-master"]


@pytest.mark.parametrize("options", [*({"precision": each} for each in PRECISIONS), {"qlora": True}, {"rslora": True}])
def test_the_base_is_bit_equal_after_training_and_adapters_have_moved(folder, options):
    with trainer_of(folder, **options) as trainer:
        before = {name: t.clone() for name, t in trainer.model.state_dict().items() if "lora_" not in name}
        losses = [trainer.step().loss for _ in range(6)]
        after = trainer.model.state_dict()
    assert losses[-1] < losses[0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(after[name].any() for name in after if name.endswith("lora_B"))
    layers = [module for module in trainer.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == (14 if options.get("qlora") else 0)


@pytest.mark.parametrize("options", [{}, {"qlora": True}, {"lora_dropout": 0.2, "activation_checkpointing": "full"}])
def test_a_resumed_run_has_the_same_bits_and_saves_adapters_alone(folder, options):
    with trainer_of(folder, **options) as whole, trainer_of(folder, **options) as first:
        torch.manual_seed(0)
        expected = [whole.step().loss for _ in range(4)]
        torch.manual_seed(0)
        found = [first.step().loss for _ in range(2)]
        state = first.state_dict()
        assert all("lora_" in name for name in state["model"]) and len(state["model"]) == 12
        assert len(state["optimizer"]["state"]) == 12
    with trainer_of(folder, **options) as second:
        second.load_state_dict(state)
        found += [second.step().loss for _ in range(2)]
    assert found == expected


def test_full_training_from_a_base_begins_with_its_weights(folder):
    config = replace(config_of(folder), lora=None)
    with trainer_of(folder, config) as trainer:
        loaded = load_hf(folder)
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, loaded.get_parameter(name)) and parameter.requires_grad
        assert trainer.step().loss > trainer.step().loss - 1


def test_another_base_is_refused_when_a_run_goes_on(folder, tmp_path):
    save_hf(Transformer(SHAPE, seed=8), tmp_path / "other")
    with trainer_of(folder) as trainer:
        state = trainer.state_dict()
    for another, message in (
        (trainer_of(tmp_path / "other"), "was trained with base"),
        (trainer_of(folder, lora=8), "was trained with lora 4, not 8"),
    ):
        with another, pytest.raises(ValueError, match=message):
            another.load_state_dict(state)


def test_qlora_needs_adapters():
    with pytest.raises(ValueError, match="qlora trains adapters"):
        TrainConfig(SHAPE, seq_len=16, qlora=True)


def on_ranks(group, folder, config, layout, make, save_to):
    how = {"base": BaseFolder(folder), "device": group.device}
    with make(group, layout) as strategy, Trainer(config, TOKENS, parallel=strategy, **how) as trainer:
        before = frozen_of(trainer)
        losses = [trainer.step().loss for _ in range(3)]
        export_adapter(trainer, save_to, "command", None)
        assert before.keys() == frozen_of(trainer).keys() and len(before) > 2
        assert all(torch.equal(after, before[name]) for name, after in frozen_of(trainer).items())
    return losses


def frozen_of(trainer):
    """What this rank has of the base, copied: weights, or codes and scales."""
    named = {**dict(trainer.module.named_parameters()), **dict(trainer.module.named_buffers())}
    here = {name: each for name, each in named.items() if each.untyped_storage().nbytes()}  # not gathered for a moment
    return {name: each.detach().clone() for name, each in here.items() if "lora_" not in name}


LAYOUTS = [
    (ParallelConfig(dp=2), False),
    (ParallelConfig(dp=2, zero=2), True),
    (ParallelConfig(dp=2, zero=3), True),
    (ParallelConfig(tp=2, sequence=True), False),
    (ParallelConfig(tp=2, sequence=True), True),
    (ParallelConfig(pp=2, accumulate=4), True),
    (ParallelConfig(tp=2, pp=2, accumulate=4), True),
    (ParallelConfig(dp=2, tp=2, zero=3, sequence=True), True),
]


# Without QLoRA the oracle has the NCCL-like backend, too.
RUNS = [
    pytest.param(
        *each,
        make_strategy,
        marks=[pytest.mark.full] if each[0].world_size > 2 else [],
        id=f"{each[0]}-{each[1]}-gloo",
    )
    for each in LAYOUTS
]
RUNS += [
    pytest.param(*each, make_nccl_like_strategy, marks=pytest.mark.full, id=f"{each[0]}-nccl_like")
    for each in LAYOUTS
    if each[1]
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("layout", "qlora", "make"), RUNS)
def test_a_run_on_ranks_is_that_of_one_process(folder, tmp_path, layout, qlora, make):
    config = config_of(folder, qlora=qlora, batch_size=4 // layout.dp)
    with trainer_of(folder, replace(config, batch_size=4)) as trainer:
        expected = [trainer.step().loss for _ in range(3)]
        rows = trainer.model(torch.arange(16)[None]).detach()
    found = launch(on_ranks, layout.world_size, folder, config, layout, make, tmp_path / "adapter")[0]
    assert found == pytest.approx(expected, rel=1e-5)
    if not qlora:  # the folder has the trained adapters, whole
        loaded = load_hf(folder)
        load_peft(loaded, tmp_path / "adapter", fingerprint=config.base)
        torch.testing.assert_close(loaded(torch.arange(16)[None]), rows, rtol=1e-3, atol=1e-4)
    assert LoraConfig(4, ("q", "v", "down")) == config.adapter


def begun_on_ranks(group, folder, config, layout):
    how = {"base": BaseFolder(folder), "device": group.device}
    with make_strategy(group, layout) as strategy, Trainer(config, TOKENS, parallel=strategy, **how) as trainer:
        for _ in range(2):
            trainer.step()
        return trainer.state_dict()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ParallelConfig(dp=2, zero=3), {"lora_dropout": 0.3}),
        (ParallelConfig(tp=2), {"lora_dropout": 0.3, "activation_checkpointing": "full"}),
        (ParallelConfig(tp=2, sequence=True), {"qlora": True, "activation_checkpointing": "selective"}),
        (ParallelConfig(pp=2, accumulate=4), {"lora_dropout": 0.3, "activation_checkpointing": "selective"}),
    ],
    ids=str,
)
def test_a_run_of_ranks_goes_on_in_one_process(folder, layout, options):
    """Dropout has the same masks there, whoever computes a block a second time."""
    config = config_of(folder, batch_size=4 // layout.dp, **options)
    with trainer_of(folder, replace(config, batch_size=4)) as trainer:
        expected = [trainer.step().loss for _ in range(4)][2:]
    state = launch(begun_on_ranks, layout.world_size, folder, config, layout)[0]
    state["config"]["batch_size"] = 4  # of the one process, which has all rows
    with trainer_of(folder, replace(config, batch_size=4)) as trainer:
        trainer.load_state_dict(state)
        assert [trainer.step().loss for _ in range(2)] == pytest.approx(expected, rel=1e-5)


def with_offload(group, folder, config, layout, offload):
    how = {"base": BaseFolder(folder), "device": group.device}
    with (
        make_strategy(group, layout, offload) as strategy,
        Trainer(config, TOKENS, parallel=strategy, **how) as trainer,
    ):
        losses = [trainer.step().loss for _ in range(3)]
        held = {name: part.dtype for name, part in trainer.module.named_parameters()}
        return losses, held, trainer.updater.home.down_bytes


def test_the_optimizers_state_lives_where_offload_says(folder):
    config, layout = config_of(folder, qlora=True, batch_size=2), ParallelConfig(dp=2, zero=2)
    with trainer_of(folder, replace(config, batch_size=4)) as trainer:
        expected = [trainer.step().loss for _ in range(3)]
        count = sum(parameter.numel() for parameter in trainer.updater.parameters)
    losses, _, down = launch(with_offload, 2, folder, config, layout, "cpu")[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert down == 3 * 4 * count / 2  # gradients of this rank's half, once a step; nothing of the base


def test_a_sharded_base_has_no_float32_masters(folder):
    config, layout = config_of(folder, precision="bf16-master", batch_size=2), ParallelConfig(dp=2, zero=3)
    _, held, _ = launch(with_offload, 2, folder, config, layout, None)[0]
    assert {dtype for name, dtype in held.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in held.items() if "lora_" not in name} == {torch.bfloat16}
