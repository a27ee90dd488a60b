"""Masks of dropout: as often as asked, alike wherever the same number is dropped, independent where it is another."""

import pytest
import torch
from torch import nn

from minillm.adapters import LoraConfig, attach
from minillm.adapters.dropout import Rows, layer_key, mask_of, mix, numbered, window_keys
from minillm.comm import launch
from minillm.model import ModelConfig, Transformer
from minillm.model.compiler import check_compiler, compile_blocks
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel

ROWS, SEQ, INPUTS = 6, 50, 64
X = torch.zeros(ROWS, SEQ, INPUTS, dtype=torch.float64)
KEYS = window_keys(3, 5, range(ROWS))


def mask(share=0.3, layer="blocks.0.mlp.down_proj", keys=KEYS, x=X, first=0, positions_of=None):
    return mask_of(
        Rows(keys, positions_of), layer_key(layer), share, x, SEQ if positions_of is None else x.shape[1], first
    )


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 0.5, 0.9])
def test_so_many_are_dropped_along_every_axis(share):
    found = mask(share)
    assert set(found.unique().tolist()) == {0.0, 1 / (1 - share)}
    dropped = (found == 0).double()
    for axes in ((), (0,), (1,), (2,)):  # of all; of each row, position and input
        others = [axis for axis in range(3) if axis not in axes]
        count = dropped.numel() // max(1, torch.tensor([dropped.shape[a] for a in axes]).prod().item())
        spread = (share * (1 - share) / count) ** 0.5
        assert (dropped.mean(others) - share).abs().max() < 5 * spread, axes


def test_the_mask_is_the_same_every_time_and_another_elsewhere():
    right = mask(0.5) > 0
    assert torch.equal(right, mask(0.5) > 0)
    others = {
        "layer": mask(0.5, layer="blocks.1.mlp.down_proj"),
        "step": mask(0.5, keys=window_keys(3, 6, range(ROWS))),
        "seed": mask(0.5, keys=window_keys(4, 5, range(ROWS))),
        "windows": mask(0.5, keys=window_keys(3, 5, range(ROWS, 2 * ROWS))),
        "rows": mask(0.5).roll(1, 0),
        "positions": mask(0.5).roll(1, 1),
        "inputs": mask(0.5).roll(1, 2),
    }
    for name, other in others.items():
        agree = ((other > 0) == right).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / right.numel() ** 0.5, name


def test_a_part_has_its_part_of_the_mask():
    """Of inputs, as a row layer's rank; of rows, as a microbatch; of positions, as with context parallelism."""
    whole = mask()
    assert torch.equal(mask(x=X[..., 16:40], first=16), whole[..., 16:40])
    assert torch.equal(mask(keys=KEYS[2:4], x=X[2:4]), whole[2:4])
    chosen = torch.tensor([7, 3, 40, 41])
    assert torch.equal(mask(x=X[:, :4], positions_of=lambda seq, device: chosen), whole[:, chosen])
    assert torch.equal(mask(x=X.float()), whole.float())


def test_mix_is_the_last_step_of_murmurhash3():
    def one(x):
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    numbers = [0, 1, 2, 2**31, 2**32 - 1, 123456789, 2**40 + 7]
    assert mix(torch.tensor(numbers)).tolist() == [one(number % 2**32) for number in numbers]
    assert len(set(mix(torch.arange(100_000)).tolist())) == 100_000  # it can be undone, so no two fall together


SHAPE = ModelConfig(37, 8, 12, 2, 2, 2, max_seq_len=16, init_std=0.3)
TOKENS = torch.randint(37, (3, 8), generator=torch.Generator().manual_seed(0))


def test_keys_hold_inside_and_evaluation_drops_nothing():
    model = Transformer(SHAPE, seed=0)
    attach(model, LoraConfig(2, ("all",), dropout=0.5, zero_start=False))
    with numbered(model, KEYS[:3]):
        first, again = model(TOKENS), model(TOKENS)
    assert torch.equal(first, again)
    with numbered(model, KEYS[3:6]):
        assert not torch.equal(first, model(TOKENS))
    assert not torch.equal(model(TOKENS), model(TOKENS)), "outside torch's generator draws"
    model.eval()
    with numbered(model, KEYS[:3]):
        assert torch.equal(model(TOKENS), model(TOKENS)) and not torch.equal(first, model(TOKENS))
    model.train()
    with (
        numbered(model, KEYS[:2]),
        pytest.raises(ValueError, match="2 rows have keys for their dropout, and the pass has 3"),
    ):
        model(TOKENS)


@pytest.mark.full
def test_a_compiled_model_drops_the_same():
    try:
        check_compiler(torch.device("cpu"))
    except ValueError as error:
        pytest.skip(str(error))
    plain, compiled = (Transformer(SHAPE, seed=0) for _ in range(2))
    for model in (plain, compiled):
        attach(model, LoraConfig(2, ("q", "down"), dropout=0.5, zero_start=False))
    compile_blocks(compiled)
    for keys in (KEYS[:3], KEYS[3:6]):
        with numbered(plain, keys), numbered(compiled, keys):
            torch.testing.assert_close(compiled(TOKENS), plain(TOKENS))


def without_keys(group):
    model = tensor_parallel(Transformer(SHAPE, seed=0), SHAPE, group)
    said = []
    for target in ("q", "down"):
        attach(model, LoraConfig(2, (target,), dropout=0.5))
        try:
            model(TOKENS)
        except ValueError as error:
            said.append(str(error))
        model = tensor_parallel(Transformer(SHAPE, seed=0), SHAPE, group)
    return said


def test_ranks_that_were_not_told_the_rows_are_refused():
    for said in launch(without_keys, 2):
        assert len(said) == 2 and all("needs to know the rows of the pass" in each for each in said)


def test_dropout_is_where_pefts_is():
    """peft's own dropout, with our masks in place of torch's."""
    peft = pytest.importorskip("peft")
    config = LoraConfig(3, ("q_proj", "v_proj", "down_proj"), dropout=0.4, zero_start=False)
    ours, theirs = (Transformer(SHAPE, seed=3, dtype=torch.float64) for _ in range(2))
    made = attach(ours, config, seed=1)
    wanted = {"r": 3, "lora_alpha": 6, "target_modules": list(config.targets), "lora_dropout": 0.4}
    peft.inject_adapter_in_model(peft.LoraConfig(**wanted), theirs)
    theirs.train()
    their = dict(theirs.named_modules())
    with torch.no_grad():
        for name, layer in made.items():
            their[f"{name}.lora_A.default"].weight.copy_(layer.lora_A)
            their[f"{name}.lora_B.default"].weight.copy_(layer.lora_B)
            their[name].lora_dropout["default"] = Masked(Rows(KEYS[:3]), name, 0.4)
    with numbered(ours, KEYS[:3]):
        ours(TOKENS).square().mean().backward()
    theirs(TOKENS).square().mean().backward()
    for name, layer in made.items():
        for mine, which in ((layer.lora_A, "lora_A"), (layer.lora_B, "lora_B")):
            other = their[f"{name}.{which}.default"].weight.grad
            torch.testing.assert_close(mine.grad, other, rtol=1e-10, atol=1e-14, msg=name)


class Masked(nn.Module):
    def __init__(self, rows, name, share):
        super().__init__()
        self.rows, self.layer, self.share = rows, layer_key(name), share

    def forward(self, x):
        return x * mask_of(self.rows, self.layer, self.share, x, x.shape[1])
