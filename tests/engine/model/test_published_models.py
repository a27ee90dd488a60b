"""The config.json of published models, as on their pages, gives the number of parameters that these pages state."""

import pytest

from minillm.model.hf.families import config_from_hf
from minillm.predict.model import parameters

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
BASE = dict(torch_dtype="bfloat16", transformers_version="4.43.0", use_cache=True, attention_dropout=0.0)
BASE |= dict(initializer_range=0.02, bos_token_id=1, eos_token_id=[1, 2], rms_norm_eps=1e-6, hidden_act="silu")
QWEN = dict(use_sliding_window=False, max_window_layers=28, rope_theta=1e6)
GEMMA = dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", head_dim=256)
GEMMA |= dict(query_pre_attn_scalar=256, attention_bias=False, cache_implementation="hybrid", pad_token_id=0)
FACTORS = dict(short_factor=[1.0] * 48, long_factor=[2.0] * 48, type="longrope")


def sizes(model_type, vocab, hidden, intermediate, layers, heads, kv_heads, positions, **others):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = BASE | dict(zip(names, (vocab, hidden, intermediate, layers, heads), strict=True))
    return raw | dict(model_type=model_type, num_key_value_heads=kv_heads, max_position_embeddings=positions) | others


PUBLISHED = {
    "Llama-2-7b": (6_738_415_616, sizes("llama", 32000, 4096, 11008, 32, 32, 32, 4096, pretraining_tp=1)),
    "Llama-3.1-8B": (
        8_030_261_248,
        sizes(
            "llama",
            128256,
            4096,
            14336,
            32,
            32,
            8,
            131072,
            rope_theta=5e5,
            rope_scaling=LLAMA3 | {"rope_type": "llama3"},
        ),
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        sizes("mistral", 32768, 4096, 14336, 32, 32, 8, 32768, rope_theta=1e6, sliding_window=None),
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        sizes("qwen2", 152064, 3584, 18944, 28, 28, 4, 131072, sliding_window=131072, **QWEN),
    ),
    "Qwen3-8B": (
        8_190_735_360,
        sizes("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128, sliding_window=None, **QWEN),
    ),
    "gemma-2-2b": (
        2_614_341_888,
        sizes("gemma2", 256000, 2304, 9216, 26, 8, 4, 8192, sliding_window=4096, sliding_window_size=4096, **GEMMA)
        | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    ),
    "gemma-3-1b-it": (
        999_885_952,
        sizes("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 32768, sliding_window=512, sliding_window_pattern=6, **GEMMA)
        | dict(rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, attn_logit_softcapping=None),
    ),
    "Phi-3-mini-128k": (
        3_821_079_552,
        sizes("phi3", 32064, 3072, 8192, 32, 32, 32, 131072, sliding_window=262144, resid_pdrop=0.0, embd_pdrop=0.0)
        | dict(original_max_position_embeddings=4096, rope_scaling=FACTORS, auto_map={"AutoConfig": "x"}),
    ),
    "Phi-4-mini": (
        3_836_021_760,
        sizes("phi3", 200064, 3072, 8192, 32, 24, 8, 131072, sliding_window=262144, tie_word_embeddings=True)
        | dict(original_max_position_embeddings=4096, rope_scaling=FACTORS, partial_rotary_factor=0.75),
    ),
    "phi-4": (
        14_659_507_200,
        sizes("phi3", 100352, 5120, 17920, 40, 40, 10, 16384, rope_theta=250000, sliding_window=None)
        | dict(original_max_position_embeddings=16384, rope_scaling=None),
    ),
    "OLMo-2-1124-7B": (
        7_298_617_344,
        sizes("olmo2", 100352, 4096, 11008, 32, 32, 32, 4096, rope_theta=500000, attention_bias=False),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    total, raw = PUBLISHED[name]
    config = config_from_hf(raw)
    assert parameters(config).total == total


def test_layers_and_contexts_of_published_models():
    gemma2, gemma3 = (config_from_hf(PUBLISHED[name][1]) for name in ("gemma-2-2b", "gemma-3-1b-it"))
    assert gemma2.full_attention_layers == tuple(range(1, 26, 2)) and gemma2.window(0) == 4096
    assert gemma3.full_attention_layers == (5, 11, 17, 23) and gemma3.sliding_rope_theta == 1e4
    phi = PUBLISHED["Phi-3-mini-128k"][1]
    assert config_from_hf(phi).max_seq_len == 4096 and config_from_hf(phi, 131072).max_seq_len == 131072
    assert config_from_hf(phi).rope_scaling.attention_factor == pytest.approx(1.19023807)
    assert config_from_hf(PUBLISHED["Phi-4-mini"][1]).rotary_dim == 96
