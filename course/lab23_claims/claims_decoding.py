"""Statements about decoding and its cache."""

from dataclasses import replace

import torch

from course.kit.receipts import Row, formula, row
from course.shared.statement import claim, computed
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import KVCache
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES, cluster

POPE = "Pope et al. 2022: https://arxiv.org/abs/2211.05102"


@claim(
    "decoding",
    "A 70B model in 16 bits on an 80 GB card leaves 5 GB for the cache.",
    "false",
    "70 GB are its weights in 8 bits; in 16 bits they take 141 GB and do not fit.",
    "with 8-bit weights 9 GB are left, for all requests together",
    "Llama Team 2024, table 3: https://arxiv.org/abs/2407.21783",
)
def five_gigabytes_left() -> list[Row]:
    model = architecture("llama-3-70b")
    return [
        computed("16-bit weights fit into 80 GB", False, 2 * model.parameters < 80e9),
        formula("left by 8-bit weights", 80e9 - model.parameters, "B"),
        computed("whole tokens in 5 GB, 8 kv heads", 15258, 5e9 // model.kv_bytes()),
    ]


@claim(
    "decoding",
    "One token of context takes about 1 MB.",
    "depends",
    "It is 2 · layers · kv heads · head_dim · bytes: from 0.13 MB (Llama 3 8B) to 0.82 (Llama 2 13B).",
    "large models with multi-head attention",
    "Ainslie et al. 2023, section 2.2: https://arxiv.org/abs/2305.13245",
)
def one_megabyte_per_token() -> list[Row]:
    expected = {"llama-3-8b": 131072, "llama-2-7b": 524288, "llama-2-13b": 819200, "llama-3-70b": 327680}
    return [
        computed(f"{name}: bytes per token", size, architecture(name).kv_bytes(), "B")
        for name, size in expected.items()
    ]


@claim(
    "decoding",
    "A 70B model's cache of 4,096 tokens takes 21 GB in 16 bits.",
    "false",
    "That is 64 heads in 32 bits. In 16 bits it is half, and with the 8 kv heads that such models have 1.34 GB.",
    "never",
    "Ainslie et al. 2023, section 2.2: https://arxiv.org/abs/2305.13245",
)
def four_thousand_tokens_take_21() -> list[Row]:
    grouped = architecture("llama-3-70b")
    every = replace(grouped, num_kv_heads=grouped.num_heads)
    return [
        computed("8 kv heads, 16 bits", 1.34e9, 4096 * grouped.kv_bytes(), "B", tolerance=0.01),
        computed("64 heads, 16 bits", 10.7e9, 4096 * every.kv_bytes(), "B", tolerance=0.01),
        computed("64 heads, 32 bits", 21.5e9, 2 * 4096 * every.kv_bytes(), "B", tolerance=0.01),
    ]


@claim(
    "decoding",
    "2 · 80 layers · 64 heads · 128 · 2 bytes make 5.2 MB of cache per token.",
    "false",
    "The product is 2.6 MB: the 2 for keys and values is in it already.",
    "never",
    "Ainslie et al. 2023, section 2.2: https://arxiv.org/abs/2305.13245",
)
def five_megabytes_per_token() -> list[Row]:
    every = replace(architecture("llama-3-70b"), num_kv_heads=64)
    return [
        computed("bytes per token", 2_621_440, every.kv_bytes(), "B"),
        computed("32,768 tokens", 85.9e9, 32768 * every.kv_bytes(), "B", tolerance=0.001),
    ]


@claim(
    "decoding",
    "70B in 16 bits on 3.35 TB/s cannot decode one sequence faster than 24 tokens per second.",
    "true",
    "Every step reads every weight once: 140 GB over the bandwidth. The 2 of 2 FLOPs per weight is no second read.",
    "several tokens per pass (speculation), or several sequences, of which each still has 24",
    POPE,
)
def twenty_four_per_second() -> list[Row]:
    speed = DEVICES["h100"].bandwidth / (2 * 70e9)
    return [computed("70B in 16 bits on 3.35 TB/s, tokens/s", 23.9, speed, tolerance=0.005)]


@claim(
    "decoding",
    "The cache of a 70B model takes 2.6 MB per token.",
    "depends",
    "With all 64 heads it would; grouped attention keeps 8: 0.33 MB.",
    "multi-head attention",
    "Ainslie et al. 2023, section 2.2: https://arxiv.org/abs/2305.13245",
)
def cache_of_seventy() -> list[Row]:
    return [
        computed("bytes per token, 8 kv heads", 2 * 80 * 8 * 128 * 2, architecture("llama-3-70b").kv_bytes(), "B"),
        formula("with 64", 2 * 80 * 64 * 128 * 2, "B"),
    ]


@claim(
    "decoding",
    "After n generated tokens the cache holds prompt + n - 1 entries.",
    "true",
    "The last token has been chosen and has not gone through the model.",
    "after one more pass",
    POPE,
)
def cache_entries_after_n() -> list[Row]:
    config = ModelConfig(64, 16, 32, 2, 2)
    model = Transformer(config, seed=0).eval()
    cache, prompt, answer = KVCache(config, 16), [1, 2, 3], 4
    cache.keys.fill_(torch.nan)  # what no token has written stays so
    with torch.no_grad():
        tokens, start = prompt, 0
        for _ in range(answer):
            logits = model(torch.tensor([tokens]), torch.arange(start, start + len(tokens)), attention=cache)
            start, tokens = start + len(tokens), [int(logits[0, -1].argmax())]
    written = cache.keys[0, 0, 0, :, 0].isfinite().sum()
    return [row("entries written: a prompt of 3, 4 generated tokens", len(prompt) + answer - 1, written)]


@claim(
    "decoding",
    "Throughput grows with the batch for ever.",
    "false",
    "From some batch on, reading caches or arithmetic takes longer than reading weights, and the caches fill the "
    "memory.",
    "small batches and short contexts",
    POPE,
)
def throughput_for_ever() -> list[Row]:
    model, device = architecture("llama-3-8b"), DEVICES["h100"]

    def speed(batch: int, context: int) -> float:
        read = 2 * model.parameters + batch * context * model.kv_bytes()
        return batch / max(read / device.bandwidth, 2 * model.parameters * batch / (device.flops * device.achievable))

    usable = cluster("h100", 1).usable
    fitting = int((usable - 2 * model.parameters) // (1024 * model.kv_bytes()))
    return [
        computed(
            "8 sequences of 1,024 tokens, times one's speed", 7.56, speed(8, 1024) / speed(1, 1024), tolerance=0.01
        ),
        computed("512, times one's speed", 97.8, speed(512, 1024) / speed(1, 1024), tolerance=0.01),
        formula("    sequences that fit beside the weights", fitting),
    ]
