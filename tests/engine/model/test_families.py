"""Families of Hugging Face models against transformers: random weights in fp32, made here, with every option."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import minillm
from minillm.model import ModelConfig, MoEConfig, Transformer, cross_entropy, load_hf, save_hf
from minillm.model.generate import generate
from minillm.model.hf.families import FAMILIES, config_from_hf, config_to_hf
from minillm.serve import LLM, SamplingParams
from minillm.serve.tiny import TinyLLM

pytestmark = pytest.mark.drawn(2)

SIZES = dict(vocab_size=67, hidden_size=32, intermediate_size=48, max_position_embeddings=128, initializer_range=0.2)
SIZES |= dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(kind="default", theta=1e4, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


LLAMA3 = rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16, beta_slow=2)
DEEPSEEK = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.2, mscale_all_dim=0.7, truncate=False)
LONG = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.5], long_factor=[1.0, 2.0, 3.0, 4.0])
PHI4 = rope("longrope", short_factor=[1.0, 1.1, 1.2], long_factor=[1.0, 2.0, 3.0], partial_rotary_factor=0.75)
GEMMA = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=9)
GEMMA3_ROPE = dict(rope_parameters={FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}})
GEMMA3_ROPE["rope_parameters"][SLIDING] = {"rope_type": "default", "rope_theta": 1e4}
QWEN_EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20)
CASES = {
    "Llama 2": ("LlamaConfig", dict(num_key_value_heads=4)),
    "Llama 3.1": ("LlamaConfig", LLAMA3),
    "Llama 3.2, tied": ("LlamaConfig", LLAMA3 | dict(tie_word_embeddings=True, head_dim=16)),
    "Llama, all biases, one kv head": (
        "LlamaConfig",
        dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1) | rope("linear", factor=4.0),
    ),
    "Llama, dynamic": ("LlamaConfig", rope("dynamic", factor=4.0)),
    "Llama, yarn of DeepSeek": ("LlamaConfig", DEEPSEEK | dict(hidden_size=48)),
    "Mistral, window": ("MistralConfig", dict(sliding_window=7, head_dim=12)),
    "Mistral, no window": ("MistralConfig", dict(sliding_window=None) | rope(theta=1e6)),
    "Qwen2": ("Qwen2Config", rope(theta=1e6)),
    "Qwen2.5, yarn, tied": ("Qwen2Config", YARN | dict(tie_word_embeddings=True)),
    "Qwen2, window in the last layer": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=9, max_window_layers=2),
    ),
    "Qwen3": ("Qwen3Config", dict(head_dim=16, num_attention_heads=6) | rope(theta=1e6)),
    "Qwen3, biases, windows": (
        "Qwen3Config",
        dict(head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=5, tie_word_embeddings=True)
        | dict(layer_types=[SLIDING, FULL, SLIDING]),
    ),
    "Gemma 2": ("Gemma2Config", GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "Gemma 2, untied, no caps": (
        "Gemma2Config",
        GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    ),
    "Gemma 3 text": (
        "Gemma3TextConfig",
        GEMMA | GEMMA3_ROPE | dict(layer_types=[SLIDING, SLIDING, FULL], num_key_value_heads=1),
    ),
    "Gemma 3 text, defaults of its layers": ("Gemma3TextConfig", GEMMA | dict(num_hidden_layers=7)),
    "Phi-3, window": ("Phi3Config", dict(sliding_window=11, original_max_position_embeddings=128)),
    "Phi-3, longrope": ("Phi3Config", LONG | dict(original_max_position_embeddings=96)),
    "Phi-4 mini": (
        "Phi3Config",
        PHI4 | dict(original_max_position_embeddings=96, tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "OLMo 2": ("Olmo2Config", rope(theta=5e5)),
    "OLMo 2, biases, 32B's grouped heads": ("Olmo2Config", dict(attention_bias=True, num_key_value_heads=1)),
    "Mixtral": ("MixtralConfig", dict(num_local_experts=4)),
    "Mixtral, one of 5 experts, window, tied": (
        "MixtralConfig",
        dict(num_local_experts=5, num_experts_per_tok=1, sliding_window=7, tie_word_embeddings=True, head_dim=12),
    ),
    "Qwen3 MoE": ("Qwen3MoeConfig", QWEN_EXPERTS | dict(norm_topk_prob=True, head_dim=16)),
    "Qwen3 MoE, not normalised, a dense layer, biases": (
        "Qwen3MoeConfig",
        QWEN_EXPERTS | dict(mlp_only_layers=[1], attention_bias=True, num_experts_per_tok=3) | YARN,
    ),
    "Qwen3 MoE, every other layer, windows": (
        "Qwen3MoeConfig",
        QWEN_EXPERTS | dict(decoder_sparse_step=2, use_sliding_window=True, sliding_window=9),
    ),
    "OLMoE": ("OlmoeConfig", dict(num_experts=6, num_experts_per_tok=3, num_key_value_heads=4)),
    "OLMoE, normalised, grouped heads, all experts": (
        "OlmoeConfig",
        dict(num_experts=4, num_experts_per_tok=4, norm_topk_prob=True, num_key_value_heads=1) | rope(theta=5e5),
    ),
}
TOKENS = torch.randint(67, (2, 90), generator=torch.Generator().manual_seed(0))
PROMPT = TOKENS[0, :21].tolist()


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


def make(transformers, family, options):
    """A model of transformers with random weights; norm weights of 1 and biases of 0 would hide that one is missing."""
    torch.manual_seed(len(str(options)))
    config = getattr(transformers, family)(**SIZES | options, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def is_greedy(model, prompt, tokens):
    """Would transformers choose each of the tokens after those before it? One pass, without a cache, for all."""
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


@torch.no_grad()
@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, transformers, tmp_path, record_property):
    family, options = CASES[case]
    theirs = make(transformers, family, options)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours = load_hf(tmp_path / "theirs")
    expected = theirs(TOKENS).logits
    difference = float((ours(TOKENS) - expected).abs().max())
    record_property("worst_logit_difference", difference)
    print(f"{case}: {difference:.1e} of {float(expected.abs().max()):.1f}")
    assert difference <= 2e-4 < expected.std()
    tokens = list(generate(ours, PROMPT, 24))
    assert len(tokens) == 24 and is_greedy(theirs, PROMPT, tokens)
    tiny = TinyLLM(ours, num_blocks=64, block_size=4, token_budget=16)
    llm = LLM(ours, num_blocks=128, block_size=4, token_budget=16, max_num_seqs=16)
    prompts = [PROMPT, PROMPT[:3], PROMPT[:9]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24))
    assert outputs[0].answers[0].ids == tokens == tiny.generate(prompts, 24)[0]
    assert [output.answers[0].ids for output in outputs] == [list(generate(ours, prompt, 24)) for prompt in prompts]

    save_hf(ours, tmp_path / "ours", max_shard_bytes=20_000)
    again = load_hf(tmp_path / "ours")
    assert again.config == ours.config
    for (name, ours_), (same, saved) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert name == same and torch.equal(ours_, saved)
    assert torch.equal(again(TOKENS), ours(TOKENS))
    load = transformers.AutoModelForCausalLM.from_pretrained
    back, report = load(tmp_path / "ours", output_loading_info=True, attn_implementation="eager")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (back(TOKENS).logits - expected).abs().max() <= 2e-4


def test_every_family_is_among_the_cases(transformers):
    assert {getattr(transformers, family).model_type for family, _ in CASES.values()} == FAMILIES.keys()


@torch.no_grad()
@pytest.mark.parametrize("length", [97, 128])
def test_longrope_for_long_sequences(length, transformers, tmp_path):
    """Whoever loads the model chooses; a sequence beyond the short context is refused."""
    theirs = make(transformers, "Phi3Config", LONG | dict(original_max_position_embeddings=96))
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(67, (1, length), generator=torch.Generator().manual_seed(1))
    short, long = load_hf(tmp_path), load_hf(tmp_path, max_seq_len=128)
    with pytest.raises(ValueError, match="longer than the context of 96"):
        short(tokens)
    assert (long(tokens) - theirs(tokens).logits).abs().max() <= 2e-4
    save_hf(long, tmp_path)  # over it: the context is no part of the checkpoint
    assert load_hf(tmp_path).config == short.config and load_hf(tmp_path, max_seq_len=128).config == long.config
    with pytest.raises(ValueError, match="max_seq_len 129 is above max_position_embeddings 128"):
        load_hf(tmp_path, max_seq_len=129)


@torch.no_grad()
def test_dynamic_for_longer_sequences(transformers, tmp_path):
    """transformers' frequencies follow the longest sequence so far, minillm's the context: equal where it is full."""
    theirs = make(transformers, "LlamaConfig", rope("dynamic", factor=4.0))
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(67, (1, 200), generator=torch.Generator().manual_seed(1))
    ours = load_hf(tmp_path, max_seq_len=200)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() <= 2e-4
    assert (load_hf(tmp_path, max_seq_len=201)(tokens) - theirs(tokens).logits).abs().max() > 1e-3
    save_hf(ours, tmp_path)
    assert load_hf(tmp_path, max_seq_len=200).config == ours.config


@torch.no_grad()
def test_half_precision_is_that_of_the_checkpoint(transformers, tmp_path):
    """Against the same weights in float32, the error is no larger than transformers'."""
    theirs = make(transformers, *CASES["Gemma 2"]).bfloat16()
    theirs.save_pretrained(tmp_path)
    ours, exact = load_hf(tmp_path), load_hf(tmp_path, dtype=torch.float32)
    assert ours.embedding.weight.dtype == torch.bfloat16
    expected = exact(TOKENS)
    error, theirs_error = ((found.float() - expected).norm() for found in (ours(TOKENS), theirs(TOKENS).logits))
    assert error <= 1.5 * theirs_error


def test_loss_with_a_soft_cap():
    config = ModelConfig(67, 32, 48, 2, 4, logit_soft_cap=0.5, init_std=0.3)
    model = Transformer(config)
    total, weight = model(TOKENS[:, :-1], targets=TOKENS[:, 1:])
    logits = model(TOKENS[:, :-1])
    assert logits.abs().max() <= 0.5
    torch.testing.assert_close(total / weight, cross_entropy(logits, TOKENS[:, 1:]))


REFUSED = {
    "architecture 'gemma3' is not supported": dict(model_type="gemma3"),
    "hidden_activation 'gelu' is not supported": dict(hidden_activation="gelu"),
    "use_bidirectional_attention is not supported": dict(use_bidirectional_attention=True),
    "key 'clip_qkv' .* is not known for gemma3_text": dict(clip_qkv=8.0),
    "rope_parameters key 'rope_type' is not known": dict(rope_parameters=dict(rope_type="default")),
    "'linear' of sliding layers is not supported": dict(
        rope_parameters={SLIDING: {"rope_type": "linear", "factor": 2}}
    ),
    "'yarn' together with sliding_rope_theta is not": dict(rope_scaling=dict(rope_type="yarn", factor=2.0)),
    "partial_rotary_factor is not supported for gemma3_text": dict(partial_rotary_factor=0.5),
    "without a full-attention layer are not supported": dict(layer_types=[SLIDING] * 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_give_other_logits_is_refused(message):
    config = ModelConfig(
        67, 32, 48, 3, 4, norm_placement="both", norm_offset=1.0, qk_norm=True, embedding_scale=32**0.5
    )
    config = replace(config, activation="gelu_tanh", full_attention_layers=(2,), sliding_rope_theta=1e4, rope_theta=1e6)
    raw = config_to_hf(config, torch.float32)
    assert config_from_hf(raw) == config
    with pytest.raises(ValueError, match=message):
        config_from_hf(raw | REFUSED[message])


@pytest.mark.parametrize(
    "options",
    [dict(norm_offset=1.0), dict(norm_placement="both"), dict(mlp_bias=True, qkv_bias=True), dict(attention_scale=0.3)],
)
def test_what_no_family_has_is_not_saved(options, tmp_path):
    with pytest.raises(ValueError, match="is not a Hugging Face architecture that minillm knows"):
        save_hf(Transformer(ModelConfig(67, 32, 48, 2, 4, **options)), tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED_EXPERTS = {
    "clip_qkv 8.0 is not supported": ("olmoe", dict(clip_qkv=8.0)),
    "top_k 7 is more than num_experts 6": ("olmoe", dict(num_experts_per_tok=7)),
    "num_experts 0 must be a whole number": ("qwen3_moe", dict(num_experts=0)),
    "decoder_sparse_step 0 must be": ("qwen3_moe", dict(decoder_sparse_step=0)),
    "mlp_only_layers 'all' must be numbers of layers": ("qwen3_moe", dict(mlp_only_layers="all")),
    "key 'shared_expert_intermediate_size' .* is not known": ("qwen3_moe", dict(shared_expert_intermediate_size=8)),
    "key 'scoring_func' .* is not known for mixtral": ("mixtral", dict(scoring_func="sigmoid")),
    "hidden_act 'gelu' is not supported": ("mixtral", dict(hidden_act="gelu")),
    "architecture 'qwen2_moe' is not supported": ("mixtral", dict(model_type="qwen2_moe")),
    "architecture 'deepseek_v3' is not supported": ("mixtral", dict(model_type="deepseek_v3")),
}
NORMS = {"mixtral": {}, "qwen3_moe": dict(qk_norm=True), "olmoe": dict(qk_norm=True, qk_norm_over_heads=True)}


@pytest.mark.parametrize("message", REFUSED_EXPERTS)
def test_other_mixtures_are_refused(message):
    kind, keys = REFUSED_EXPERTS[message]
    config = ModelConfig(67, 32, 48, 3, 4, 2, moe=MoEConfig(6, 2), **NORMS[kind])
    raw = config_to_hf(config, torch.float32)
    assert raw["model_type"] == kind and config_from_hf(raw) == config
    with pytest.raises(ValueError, match=message):
        config_from_hf(raw | keys)


def test_a_checkpoint_without_one_experts_tensor_is_refused(tmp_path):
    model = Transformer(ModelConfig(67, 32, 48, 2, 4, moe=MoEConfig(3, 2)))
    save_hf(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    held = tensors.pop(name)
    for found, message in (({}, f"lacks tensor {name}"), ({name: held[:1]}, r"has shape \[1, 32\]")):
        save_file(tensors | found, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_hf(tmp_path)


def test_choices_of_training_do_not_keep_experts_from_being_saved(tmp_path):
    """What a checkpoint does not hold is chosen anew by whoever loads it; what changes the logits must be in it."""
    moe = MoEConfig(3, 2, balance_loss=0.01, z_loss=0.001, capacity_factor=1.25)
    model = Transformer(ModelConfig(67, 32, 48, 2, 4, moe=moe))
    for _ in range(2):  # into a new folder, and over what is there
        save_hf(model, tmp_path)
    assert load_hf(tmp_path).config.moe == MoEConfig(3, 2, 48)
    others = (dict(scores="sigmoid"), dict(bias_update_rate=0.1), dict(shared_experts=1), dict(intermediate_size=8))
    for other in (
        *others,
        dict(weight_scale=2.0),
        dict(normalize=False),
        dict(choice="expert"),
        dict(dense_layers=[1]),
    ):
        model = Transformer(ModelConfig(67, 32, 48, 2, 4, moe=MoEConfig(3, 2, **other)))
        with pytest.raises(ValueError, match="is not a Hugging Face architecture that minillm knows"):
            save_hf(model, tmp_path / "other")


MEMORY = """
import resource, sys
from minillm.model import load_hf
import torch
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
load_hf(sys.argv[1], progress=True)
before = peak()
model = load_hf(sys.argv[2], progress=True)
print(peak() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.full
def test_shards_are_streamed_without_a_second_copy(tmp_path):
    """Receipt: the peak grows by the model and about one shard, not by two models; and there is a progress bar."""
    config = ModelConfig(512, 512, 2048, 10, 8)
    save_hf(Transformer(replace(config, num_layers=1)), tmp_path / "small")
    save_hf(Transformer(config), tmp_path / "large", max_shard_bytes=8 << 20)
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 15
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(minillm.__file__).parents[1])
    grown, size = map(int, done.stdout.split())
    assert size > 160e6 and grown <= size + (24 << 20)
    assert "loading:" in done.stderr and "B/s" in done.stderr
