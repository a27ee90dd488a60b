"""peft as the reference: gradients and updates in float64, and its folders in and out. Skipped without peft."""

import json
from dataclasses import replace

import pytest
import torch

from minillm.adapters import LoraConfig, attach, merge
from minillm.adapters.attach import adapter_parameters
from minillm.adapters.peft_folder import CONFIG, load_peft, save_peft
from minillm.model import ModelConfig, Transformer, cross_entropy, load_hf, save_hf

peft = pytest.importorskip("peft")

PLAIN = ModelConfig(37, 12, 17, 2, 4, 2, head_dim=4, max_seq_len=16, init_std=0.3)
MODELS = {
    "plain": PLAIN,
    "tied, biases": replace(PLAIN, tie_embeddings=True, qkv_bias=True),
    "head norms": replace(PLAIN, qk_norm=True),
}
CONFIGURATIONS = [
    ("plain", {"rank": 1, "targets": ("q_proj",)}),
    ("plain", {"rank": 3, "targets": ("q_proj", "v_proj")}),
    ("plain", {"rank": 3, "targets": ("q_proj", "v_proj"), "alpha": 7.0}),
    ("plain", {"rank": 5, "targets": ("down_proj",), "rslora": True}),
    ("plain", {"rank": 8, "targets": ("gate_proj", "up_proj", "down_proj"), "alpha": 1.0}),
    ("plain", {"rank": 20, "targets": ("o_proj",)}),  # more than the layer has inputs
    ("plain", {"rank": 4, "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj"), "dropout": 0.3}),
    ("tied, biases", {"rank": 2, "targets": ("q_proj", "k_proj", "v_proj")}),
    ("tied, biases", {"rank": 4, "targets": ("k_proj", "down_proj"), "rslora": True, "alpha": 3.0}),
    ("tied, biases", {"rank": 3, "targets": ("v_proj",), "dropout": 0.5}),
    ("head norms", {"rank": 4, "targets": ("q_proj", "k_proj")}),
    ("head norms", {"rank": 16, "targets": ("q_proj", "v_proj", "o_proj", "gate_proj"), "rslora": True}),
    ("head norms", {"rank": 6, "targets": ("up_proj",), "alpha": 12.0, "zero_start": True}),
    ("plain", {"rank": 2, "targets": ("q_proj", "v_proj"), "zero_start": True}),
]


def theirs_of(config: LoraConfig, **more):
    named = {"r": config.rank, "lora_alpha": config.full_alpha, "target_modules": list(config.targets)}
    return peft.LoraConfig(use_rslora=config.rslora, lora_dropout=config.dropout, **named, **more)


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_gradients_and_updates_equal_pefts(number):
    kind, options = CONFIGURATIONS[number]
    config = LoraConfig(**{"zero_start": False} | options)
    ours, theirs = (Transformer(MODELS[kind], seed=3, dtype=torch.float64) for _ in range(2))
    before = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    attach(ours, config, seed=number)
    peft.inject_adapter_in_model(theirs_of(config), theirs)
    theirs.train()
    mine = adapter_parameters(ours)
    their = {name.replace(".default.weight", ""): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert their.keys() == mine.keys()
    with torch.no_grad():
        for name, parameter in their.items():
            parameter.data = mine[name].detach().clone()
    draw = torch.Generator().manual_seed(number)
    optimizers = [torch.optim.AdamW(each.values(), lr=0.05, weight_decay=0.1) for each in (mine, their)]
    for step in range(3):
        tokens, targets = torch.randint(37, (2, 3, 9), generator=draw)
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)  # of dropout
            losses.append(cross_entropy(model(tokens), targets))
            optimizer.zero_grad()
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-14)
        for name in mine:
            torch.testing.assert_close(mine[name].grad, their[name].grad, rtol=1e-10, atol=1e-14, msg=name)
        for optimizer in optimizers:
            optimizer.step()
        for name in mine:
            torch.testing.assert_close(mine[name], their[name], rtol=1e-9, atol=1e-12, msg=name)
    for name, parameter in ours.named_parameters():
        if name not in mine:
            assert torch.equal(parameter, before[name.replace(".base.", ".")]), name


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save_hf(Transformer(PLAIN, seed=1, dtype=torch.float32), folder)
    return folder


def hugging_face(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


FOLDERS = [
    LoraConfig(3, ("q_proj", "v_proj"), alpha=7),
    LoraConfig(4, ("all",), rslora=True),
    LoraConfig(2, ("down_proj",), dropout=0.2),
]
TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("config", FOLDERS, ids=["q v", "all", "down"])
def test_a_folder_of_pefts_loads_and_ours_loads_in_peft(config, base, tmp_path):
    wanted = theirs_of(config, init_lora_weights=False)
    if config.targets == ("all",):
        wanted.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = peft.get_peft_model(hugging_face(base), wanted).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hf(base).eval()
    made = load_peft(ours, tmp_path / "theirs")
    assert len(made) == 2 * len(wanted.target_modules)
    logits = ours(TOKENS)
    torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    save_peft(ours, config, tmp_path / "ours", base=base)
    again = peft.PeftModel.from_pretrained(hugging_face(base), tmp_path / "ours").eval()
    torch.testing.assert_close(logits, again(TOKENS).logits, rtol=1e-4, atol=1e-5)
    raw = json.loads((tmp_path / "ours" / CONFIG).read_text())
    assert (raw["r"], raw["lora_alpha"], raw["use_rslora"]) == (config.rank, config.full_alpha, config.rslora)
    merge(ours)
    merged = again.merge_and_unload()
    torch.testing.assert_close(ours(TOKENS), merged(TOKENS).logits, rtol=1e-4, atol=1e-5)
