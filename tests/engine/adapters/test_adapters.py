"""The layer beside every kind of base, names, merging, peft's folders when they are bad, and QLoRA's backward pass."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.adapters import LoraConfig, adapters, attach, detach, merge, switched_off, unmerge
from minillm.adapters.attach import adapter_parameters, matches
from minillm.adapters.dropout import numbered
from minillm.adapters.peft_folder import CONFIG, TENSORS, load_peft, read_peft, save_peft
from minillm.adapters.start import BaseFolder, Start
from minillm.comm import launch
from minillm.model import ModelConfig, MoEConfig, Transformer, load_hf, save_hf
from minillm.quantize import NF4, QuantizedLinear, Settings, quantize
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import Hybrid

pytestmark = pytest.mark.drawn(2)

TINY = ModelConfig(37, 12, 20, 2, 4, 2, head_dim=4, max_seq_len=16, init_std=0.3)
TOKENS = torch.arange(24).view(2, 12)
ALL = LoraConfig(3, ("all",), zero_start=False)


def model(dtype=torch.float64, config=TINY):
    return Transformer(config, seed=5, dtype=dtype)


def test_an_adapter_begins_with_no_change_and_trains_alone():
    changed, plain = model(), model()
    made = attach(changed, LoraConfig(3))
    assert list(made) == [f"blocks.{n}.attention.{name}_proj" for n in range(2) for name in "qv"]
    assert torch.equal(changed(TOKENS), plain(TOKENS))
    assert {name for name, p in changed.named_parameters() if p.requires_grad} == adapter_parameters(changed).keys()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merged_is_the_same_function_and_unmerged_the_base_again(dtype):
    changed, plain = model(dtype), model(dtype)
    attach(changed, ALL)
    adapted, eps = changed(TOKENS), torch.finfo(dtype).eps
    merge(changed)
    assert (changed(TOKENS) - adapted).abs().max() < 200 * eps
    with pytest.raises(ValueError, match="merged already: a second time would add"):
        merge(changed)
    with pytest.raises(ValueError, match="switched off"), switched_off(changed):
        pass
    unmerge(changed)
    with pytest.raises(ValueError, match="nothing to take out"):
        unmerge(changed)
    detach(changed)
    for (name, weight), other in zip(changed.named_parameters(), plain.parameters(), strict=True):
        assert (weight - other).abs().max() <= 4 * eps * other.abs().max(), name


def test_a_merged_model_is_saved_as_a_plain_one(tmp_path):
    changed = model(torch.float32)
    attach(changed, ALL)
    logits = changed(TOKENS)
    merge(changed)
    detach(changed)
    save_hf(changed, tmp_path)
    assert torch.allclose(load_hf(tmp_path)(TOKENS), logits, atol=1e-4)


def test_switched_off_is_the_base():
    changed, plain = model(), model()
    attach(changed, ALL)
    with switched_off(changed):
        assert torch.equal(changed(TOKENS), plain(TOKENS))
    assert not torch.equal(changed(TOKENS), plain(TOKENS))


def test_scale():
    assert LoraConfig(4).scale == 2 and LoraConfig(4, alpha=8, rslora=True).scale == 4


def test_names_are_ours_or_hugging_faces():
    name = "blocks.1.attention.q_proj"
    for pattern in (
        "q",
        "q_proj",
        "attention.q_proj",
        "self_attn.q",
        "model.layers.1.self_attn.q_proj",
        "*.1.*",
        "all",
    ):
        assert matches(pattern, name), pattern
    for pattern in ("v", "proj", "layers.0.self_attn.q_proj", "eq_proj", "blocks.11.attention.q"):
        assert not matches(pattern, name), pattern


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank 0 must be a whole number of at least 1"),
        ({"rank": 2.5}, "rank 2.5 must be"),
        ({"rank": 2, "alpha": 0}, "alpha 0 must be a number above 0"),
        ({"rank": 2, "dropout": 1}, "dropout 1 is outside"),
        ({"rank": 2, "targets": ("q", "")}, "name no layer"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


def test_an_unknown_target_lists_what_there_is():
    with pytest.raises(ValueError, match=r"'qkv' matches no layer: there are q_proj, k_proj, .*, down_proj"):
        attach(model(), LoraConfig(2, ("q", "qkv")))


@pytest.mark.parametrize("target", ["gate", "experts", "*.experts.down"])
def test_routed_experts_have_no_adapters(target):
    """Refused with the reason; "all" is every other layer, those of shared experts included."""
    config = replace(TINY, moe=MoEConfig(4, 2, 8))
    with pytest.raises(ValueError, match=r"there are q_proj, .*; routed experts have none: their weights"):
        attach(Transformer(config), LoraConfig(2, (target,)))
    shared = replace(TINY, moe=MoEConfig(4, 2, 8, shared_experts=1))
    made = attach(Transformer(shared), LoraConfig(2, ("all",)))
    assert {name.split(".", 2)[2] for name in made} >= {"attention.q_proj", "mlp.shared.down_proj"}


def test_a_second_adapter_is_refused():
    changed = model()
    attach(changed, ALL)
    with pytest.raises(ValueError, match="has adapters"):
        attach(changed, ALL)


# QLoRA.


def quantized():
    config = ModelConfig(37, 64, 64, 2, 4, 2, max_seq_len=16, init_std=0.3)
    codes, floats = Transformer(config, seed=5), Transformer(config, seed=5)
    quantize(codes, Settings(NF4()))
    with torch.no_grad():
        for name, layer in codes.named_modules():
            if isinstance(layer, QuantizedLinear):
                floats.get_submodule(name).weight.copy_(layer.weight)
    return codes, floats


def test_gradients_through_codes_are_those_of_the_weights_that_they_stand_for():
    codes, floats = quantized()
    losses = []
    for each in (codes, floats):
        attach(each, ALL, seed=1)
        loss, _ = each(TOKENS, targets=TOKENS.roll(1))
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    expected = adapter_parameters(floats)
    for name, parameter in adapter_parameters(codes).items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    assert all(p.grad is None for name, p in codes.named_parameters() if name not in expected)


def test_no_float_copy_of_the_codes_is_kept_for_backward():
    codes, _ = quantized()
    attach(codes, LoraConfig(2, ("q", "v")))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        codes(TOKENS, targets=TOKENS)
    assert (64, 64) not in [tuple(size) for size in sizes]


def kept_over_ranks(group):
    """Shapes of weights that two ranks keep for backward: beside codes, and beside floats for comparison."""
    config, lora, found = ModelConfig(64, 64, 128, 1, 4, 2, head_dim=64), LoraConfig(2, ("q", "down"), dropout=0.1), []
    with Hybrid(group, ParallelConfig(tp=2)) as strategy:
        for qlora in (True, False):
            model, kept = strategy.build(config, seed=0, start=Start(lora=lora, qlora=qlora)), Kept()
            with kept.watching(), numbered(model, torch.arange(2)):
                model(TOKENS, targets=TOKENS)
            found.append({shape for shape in kept.shapes if len(shape) == 2 and min(shape) >= 64})
    return found


class Kept:
    def __init__(self):
        self.shapes = []

    def watching(self):
        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)

    def note(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        return tensor


@pytest.mark.full
def test_nor_is_one_on_tensor_parallel_ranks():
    for beside_codes, beside_floats in launch(kept_over_ranks, 2):
        assert beside_floats == {(128, 64), (64, 64), (64, 128)}  # query; key, value and the MLP's; o
        assert beside_codes == set()


def test_codes_cannot_be_merged_into():
    codes, _ = quantized()
    attach(codes, ALL)
    with pytest.raises(ValueError, match="quantized, and its codes cannot take an update"):
        merge(codes)


# Folders.


@pytest.fixture
def folder(tmp_path):
    changed = model(torch.float32)
    attach(changed, ALL)
    save_peft(changed, ALL, tmp_path / "adapter", base="some/base", fingerprint="01234567")
    return tmp_path / "adapter"


def test_a_folder_is_read_as_it_was_written(folder):
    changed = model(torch.float32)
    attach(changed, ALL)
    other = model(torch.float32)
    load_peft(other, folder, fingerprint="01234567")
    assert torch.equal(changed(TOKENS), other(TOKENS))
    adapter = read_peft(folder)
    assert (adapter.base, adapter.config.rank, adapter.config.scale) == ("some/base", 3, ALL.scale)
    assert adapter.nbytes == 4 * sum(p.numel() for p in adapter_parameters(changed).values())


def edited(folder, **changes):
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | changes))


def tensors_edited(folder, change):
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / CONFIG).unlink(), "is not a folder of peft's adapters"),
        (lambda f: (f / CONFIG).write_text("{"), "is damaged"),
        (lambda f: (f / CONFIG).write_text("[1]"), "is of kind None: only LORA"),
        (lambda f: edited(f, peft_type="IA3"), "is of kind 'IA3': only LORA"),
        (lambda f: edited(f, r=0), "rank 0 must be"),
        (lambda f: edited(f, r=5), "does not fit r 5"),
        (lambda f: edited(f, use_dora=True), "use_dora True is not covered"),
        (lambda f: edited(f, rank_pattern={"q_proj": 4}), "rank_pattern .* is not covered"),
        (lambda f: edited(f, modules_to_save=["lm_head"]), "modules_to_save .* is not covered"),
        (lambda f: edited(f, init_lora_weights="pissa_niter_4"), "changes the base's weights"),
        (lambda f: edited(f, init_lora_weights="lora_ga"), "changes the base's weights"),
        (lambda f: (f / TENSORS).unlink(), "is not complete"),
        (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-100]), "is damaged"),
        (lambda f: (f / TENSORS).write_bytes(b"nonsense"), "is damaged"),
        (lambda f: tensors_edited(f, lambda t: t.pop(FIRST)), "has lora_B alone"),
        (lambda f: tensors_edited(f, lambda t: t[FIRST].fill_(float("nan"))), "not finite"),
        (
            lambda f: tensors_edited(f, lambda t: t.update({"x.lora_A.weight": t[FIRST].clone()})),
            "for which there is no place",
        ),
        (lambda f: tensors_edited(f, lambda t: t.clear()), "holds no adapter"),
    ],
)
def test_a_bad_folder_is_refused_in_one_sentence(folder, damage, message):
    damage(folder)
    other = model(torch.float32)
    with pytest.raises(ValueError, match=message) as told:
        load_peft(other, folder)
    assert "\n" not in str(told.value) and str(folder) in str(told.value)
    assert not adapters(other)


@pytest.mark.parametrize(
    ("config", "fingerprint", "message"),
    [
        (TINY, "89abcdef", "trained on another base .some/base, fingerprint 01234567, not 89abcdef"),
        (ModelConfig(37, 16, 20, 2, 4, 2, head_dim=4), "", r"mlp.down_proj is \[12, 20\], here it is \[16, 20\]"),
        (ModelConfig(37, 12, 20, 1, 4, 2, head_dim=4), "", "layers.1.mlp.down_proj, which this model lacks"),
    ],
)
def test_another_base_is_refused(folder, config, fingerprint, message):
    with pytest.raises(ValueError, match=message):
        load_peft(Transformer(config), folder, fingerprint=fingerprint)


def test_what_a_folder_holds_is_not_written_over(folder):
    changed = model(torch.float32)
    attach(changed, ALL)
    with pytest.raises(ValueError, match="holds something already"):
        save_peft(changed, ALL, folder)


def test_fingerprints_tell_bases_apart(tmp_path):
    for seed in (0, 1):
        save_hf(Transformer(TINY, seed=seed), tmp_path / str(seed))
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    first, other, copy = (BaseFolder(tmp_path / name) for name in ("0", "1", "copy"))
    assert first.fingerprint == copy.fingerprint != other.fingerprint


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_folder_draws_what_load_hf_loads(tmp_path, tied):
    config = ModelConfig(37, 12, 20, 2, 4, 2, head_dim=4, tie_embeddings=tied, qkv_bias=True)
    save_hf(Transformer(config, seed=3), tmp_path)
    base = BaseFolder(tmp_path)
    for name, parameter in load_hf(tmp_path).named_parameters():
        assert torch.equal(base.draw(base.config, name, tuple(parameter.shape), 0), parameter)
