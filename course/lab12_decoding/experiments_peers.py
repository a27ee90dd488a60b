"""Lab 12 beside Hugging Face transformers: the same weights, prompt and greedy tokens, and what its cache holds."""

import time
from typing import Any

import torch

from course.kit.answers import answers_of
from course.lab12_decoding.decoders import Cache, WatchedModel
from course.lab12_decoding.experiments import target, windows
from course.shared.measuring import one_thread
from minillm.model.generate import folder_of

ANSWERS = answers_of("12_decoding")


@one_thread()
@torch.no_grad()
def beside_transformers(prompt: int = 48, answer: int = 32) -> dict[str, dict[str, Any]] | None:
    """{who: tokens, entries and bytes of the cache, passes, seconds}; None if transformers is not installed."""
    try:
        from transformers import AutoModelForCausalLM, DynamicCache
        from transformers.utils import logging
    except ImportError:
        return None
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder_of("target"), dtype=torch.float32)
    ids, model = windows(1, prompt), target()
    theirs.generation_config.eos_token_id = None  # go on to the end
    passes = []
    theirs.register_forward_pre_hook(lambda module, args, kwargs: passes.append(1), with_kwargs=True)
    kept = DynamicCache(config=theirs.config)
    start = time.perf_counter()
    found = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=kept,
        max_new_tokens=answer,
        do_sample=False,
        pad_token_id=0,
    )
    took = time.perf_counter() - start
    cache, watched = Cache(model.config, prompt + answer, ANSWERS.attend), WatchedModel(model)
    start = time.perf_counter()
    tokens = ANSWERS.generate(watched, ids[0].tolist(), answer, cache)
    own = time.perf_counter() - start
    return {
        "transformers, DynamicCache": {
            "tokens": found[0, prompt:].tolist(),
            "entries": kept.get_seq_length(),
            "bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers),
            "passes": len(passes),
            "seconds": took,
        },
        "exercise 2": {
            "tokens": tokens,
            "entries": cache.entries,
            "bytes": cache.bytes,
            "passes": len(watched.passes),
            "seconds": own,
        },
    }
