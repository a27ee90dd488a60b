"""Both ways between minillm and transformers' folders, and what a damaged folder says."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.model import ModelConfig, RopeScaling, Transformer, load_hf, save_hf
from minillm.model.hf.families import config_from_hf, config_to_hf
from minillm.model.hf.load import read_config
from minillm.model.hf.write import plan_shards

SIZES = dict(vocab_size=67, hidden_size=32, intermediate_size=48, max_position_embeddings=128, rms_norm_eps=1e-5)
SIZES |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
FAMILIES = [
    ("LlamaConfig", {}),
    ("LlamaConfig", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    ("LlamaConfig", dict(rope_parameters=LINEAR, num_key_value_heads=1, head_dim=16)),
    ("MistralConfig", dict(sliding_window=7)),
    ("Qwen2Config", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    ("Qwen2Config", dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=9, max_window_layers=0)),
    ("Qwen3Config", dict(head_dim=16)),
    ("Qwen3Config", dict(head_dim=8, tie_word_embeddings=True, num_key_value_heads=4)),
]
TOKENS = torch.randint(67, (2, 40), generator=torch.Generator().manual_seed(0))
SMALL = ModelConfig(67, 32, 48, 2, 4, 2, max_seq_len=64)


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


@torch.no_grad()
def test_a_head_stored_beside_a_tied_flag_counts(transformers, tmp_path):
    """transformers unties such a model; with the embedding as its head the logits would be silently wrong."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, initializer_range=0.3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for head, tied in ((tensors["model.embed_tokens.weight"].clone(), True), (torch.randn(67, 32), False)):
        save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        ours, theirs = load_hf(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert ours.config.tie_embeddings is tied
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_scaling_with_the_original_context_outside_of_it(key, transformers, tmp_path):
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    rope = {name: value for name, value in LLAMA3.items() if not name.startswith("original")}
    raw |= {key: rope, "rope_theta": 5e5, "original_max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = load_hf(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ours.config.rope_scaling.original_max_seq_len == 16
    assert torch.equal(ours.rope.frequencies, theirs.model.rotary_emb.inv_freq)
    assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-4


def shake(model):
    """Norm weights of 1 and biases of 0 would hide that they are missing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


@pytest.mark.parametrize("family, options", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers_both_ways(family, options, transformers, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, family)(**SIZES | options)
    theirs = shake(transformers.AutoModelForCausalLM.from_config(config))
    expected = theirs(TOKENS).logits
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hf(tmp_path / "theirs")
    assert (ours(TOKENS) - expected).abs().max() <= 1e-5 < expected.abs().max()
    save_hf(ours, tmp_path / "ours", max_shard_bytes=20_000)
    assert (tmp_path / "ours/model.safetensors.index.json").exists()
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (back(TOKENS).logits - expected).abs().max() <= 1e-5
    assert load_hf(tmp_path / "ours").config == ours.config


@torch.no_grad()
def test_sharded_by_transformers_and_config_of_an_older_version(transformers, tmp_path):
    config = transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    theirs = shake(transformers.AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    new = load_hf(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_scaling"] = {key: value for key, value in raw.pop("rope_parameters").items() if key != "rope_theta"}
    raw["rope_theta"], raw["torch_dtype"] = 5e5, raw.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    old = load_hf(tmp_path)
    assert new.config == old.config and new.config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    assert (old(TOKENS) - theirs(TOKENS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "options", [{}, dict(qk_norm=True), dict(qkv_bias=True), dict(sliding_window=5), dict(head_dim=6)]
)
@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 2.0), RopeScaling("llama3", 4.0, 1.0, 3.0, 77)])
def test_config_round_trip(options, scaling):
    config = ModelConfig(67, 30 if "head_dim" in options else 32, 48, 3, 4, 1, rope_scaling=scaling, **options)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config, torch.float32)))) == config


def test_dtypes(tmp_path):
    model = Transformer(SMALL, dtype=torch.bfloat16)
    save_hf(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    kept, raised = load_hf(tmp_path), load_hf(tmp_path, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(kept.get_parameter(name), parameter) and kept.get_parameter(name).dtype == torch.bfloat16
        assert torch.equal(raised.get_parameter(name), parameter.float())
    save_hf(raised, tmp_path)  # over the other dtype
    assert load_hf(tmp_path).embedding.weight.dtype == torch.float32


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def edit_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


K = "model.layers.1.self_attn.k_proj.weight"
DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "bad json": (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
    "json list": (lambda f: (f / "config.json").write_text("[]"), "config.json: "),
    "architecture": (
        lambda f: edit_config(f, model_type="gpt2"),
        "architecture 'gpt2' is not supported: use one of llama",
    ),
    "key missing": (lambda f: edit_config(f, hidden_size=...), "key 'hidden_size' is missing"),
    "does not divide": (lambda f: edit_config(f, num_key_value_heads=3), "config.json: num_heads 4 is not divisible"),
    "activation": (lambda f: edit_config(f, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "bias": (lambda f: edit_config(f, attention_bias=True), "lacks tensor model.layers.0.self_attn.k_proj.bias"),
    "rope kind": (lambda f: edit_config(f, rope_scaling=dict(rope_type="ntk", factor=2.0)), "'ntk' is not supported"),
    "rope key": (
        lambda f: edit_config(f, rope_scaling=dict(rope_type="linear", factor=2.0, mrope_section=[1])),
        "rope key 'mrope_section' is not known for rope type 'linear'",
    ),
    "two original contexts": (
        lambda f: edit_config(
            f,
            rope_scaling=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32),
            original_max_position_embeddings=16,
        ),
        "original_max_position_embeddings is 16, but 32 in the RoPE scaling",
    ),
    "unknown key": (lambda f: edit_config(f, clip_qkv=8.0), r"key 'clip_qkv' \(8.0\) is not known for llama"),
    "key of another family": (
        lambda f: edit_config(f, final_logit_softcapping=30.0),
        "key 'final_logit_softcapping' .* is not known for llama",
    ),
    "quantized by config": (
        lambda f: edit_config(f, quantization_config=dict(quant_method="bitsandbytes")),
        "quantized checkpoints are not supported",
    ),
    "rope factor": (lambda f: edit_config(f, rope_scaling=dict(rope_type="llama3")), "rope key 'factor' is missing"),
    "partial rotary": (
        lambda f: edit_config(f, rope_scaling=dict(rope_type="default", partial_rotary_factor=0.5)),
        "partial_rotary_factor is not supported",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there are no weights to load"),
    "truncated": (truncate, "model.safetensors is truncated or not a safetensors file"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated or not a safetensors file"),
    "tensor missing": (lambda f: edit_tensors(f, **{K: None}), f"lacks tensor {K}: its checkpoint is not complete"),
    "tensor extra": (lambda f: edit_tensors(f, extra=torch.ones(1)), "holds tensor extra, for which"),
    "shape": (
        lambda f: edit_tensors(f, **{K: torch.ones(8, 32)}),
        rf"tensor {K} .* has shape \[8, 32\], .* \[16, 32\]",
    ),
    "quantized": (
        lambda f: edit_tensors(f, **{"model.embed_tokens.weight": torch.ones(67, 32, dtype=torch.int8)}),
        "is torch.int8: quantized checkpoints are not supported",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_named(damage, tmp_path):
    save_hf(Transformer(SMALL), tmp_path)
    inflict, message = DAMAGE[damage]
    inflict(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path)


def test_damaged_shards_are_named(tmp_path):
    save_hf(Transformer(SMALL), tmp_path, max_shard_bytes=20_000)
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": where | {"lm_head.weight": where["model.embed_tokens.weight"]}}))
    with pytest.raises(ValueError, match=r"lacks tensor lm_head.weight, which .* says it holds"):
        load_hf(tmp_path)
    index.write_text(json.dumps({"weight_map": where}))
    (tmp_path / where["lm_head.weight"]).unlink()
    with pytest.raises(ValueError, match="a shard is missing"):
        load_hf(tmp_path)
    (tmp_path / where["lm_head.weight"]).mkdir()
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_hf(tmp_path)
    for damaged in ({}, {"weight_map": list(where)}, {"weight_map": dict.fromkeys(where, 1)}):
        index.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="is not a safetensors index"):
            load_hf(tmp_path)


def test_derived_tensors_of_old_checkpoints_are_left_out(tmp_path):
    model = Transformer(ModelConfig(67, 32, 48, 2, 4, 2, tie_embeddings=True))
    save_hf(model, tmp_path)
    head = model.embedding.weight.detach().clone()
    derived = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    edit_tensors(tmp_path, **derived)
    assert torch.equal(load_hf(tmp_path)(TOKENS), model(TOKENS))


def test_which_layers_slide():
    raw = config_to_hf(ModelConfig(67, 32, 48, 2, 4, qk_norm=True, sliding_window=8), torch.float32)
    for types in (["full_attention"], ["full_attention", "chunked_attention"]):
        with pytest.raises(ValueError, match=r"layer_types .* must be full_attention or sliding_attention, for 2"):
            config_from_hf(raw | {"layer_types": types})
    mixed = config_from_hf(raw | {"layer_types": ["full_attention", "sliding_attention"]})
    assert (mixed.sliding_window, mixed.full_attention_layers) == (8, (0,))
    assert (mixed.window(0), mixed.window(1)) == (None, 8)
    del raw["layer_types"]
    assert config_from_hf(raw | {"max_window_layers": 0}).full_attention_layers == ()
    assert config_from_hf(raw | {"max_window_layers": 1}) == mixed
    assert config_from_hf(raw | {"max_window_layers": 2}).sliding_window is None
    assert config_from_hf(raw | {"use_sliding_window": False}).sliding_window is None


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"qkv_bias True together with the rest .* not a Hugging Face"):
        save_hf(Transformer(ModelConfig(67, 32, 48, 2, 4, qk_norm=True, qkv_bias=True)), tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes 0 must be at least 1"):
        save_hf(Transformer(SMALL), tmp_path, max_shard_bytes=0)
    save_hf(Transformer(SMALL), tmp_path)
    with pytest.raises(ValueError, match=r"another model .num_layers 2, not 3"):
        save_hf(Transformer(ModelConfig(67, 32, 48, 3, 4, 2, max_seq_len=64)), tmp_path)
    assert read_config(tmp_path) == SMALL


def test_shards_are_filled_in_order():
    sizes = dict(a=5, b=5, c=1, d=20, e=3)
    assert plan_shards(sizes, None) == [["a", "b", "c", "d", "e"]]
    assert plan_shards(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
