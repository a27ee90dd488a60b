"""Lab 13's peer: the paged cache of Hugging Face transformers (version 5), the same model, the same prompts."""

from typing import Any

import torch

from course.lab13_paged_attention import formulas as predict
from course.lab13_paged_attention.experiments import cut, naive
from course.shared.measuring import one_thread
from minillm.model.generate import folder_of

PREFIX, OWN, REQUESTS, ANSWER = 70, 9, 4, 6


@one_thread()
def transformers_pages(page_size: int = 16) -> dict[str, Any]:
    """R requests with one prefix, the first before the others: hits, pages held, waste. ImportError if it is missing.

    waste: unused slots of the pages of all requests, as its own allocator sizes them, by its default page too.
    """
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers import logging as chatter

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder_of("target"), dtype=torch.float32, attn_implementation="sdpa")
    prompts = [cut(PREFIX, 1) + cut(OWN, 50 + r) for r in range(REQUESTS)]
    wanted = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=64, max_batch_tokens=256, use_cuda_graph=False, use_async_batching=False
    )
    answers, hits = {}, []
    options = {"generation_config": wanted, "continuous_batching_config": pages, "block": True, "timeout": 5}
    with model.continuous_batching_context_manager(**options) as manager:

        def serve(first: int, last: int) -> None:
            for prompt in prompts[first:last]:
                manager.add_request(prompt)
            for _ in range(200):
                if len(answers) == last:
                    return
                result = manager.get_result(timeout=0.5)
                if result is not None and result.is_finished():
                    answers[tuple(result.prompt_ids)] = list(result.generated_tokens)
            raise RuntimeError("transformers' continuous batching gave no answer")

        serve(0, 1)
        cache = manager.batch_processor.cache
        look = cache.search_prefix_match
        cache.search_prefix_match = lambda *args: hits.append(look(*args)) or hits[-1]
        serve(1, REQUESTS)
        ledger = next(iter(cache.cache_allocators.values())).ledger
        kept = len(ledger.cached_blocks)
    tokens = PREFIX + OWN + ANSWER - 1
    return {
        "equal": all(answers[tuple(prompt)] == naive(prompt, ANSWER) for prompt in prompts),
        "hits": hits,
        "expected": [predict.cacheable_tokens(PREFIX, PREFIX + OWN, page_size)] * (REQUESTS - 1),
        "kept": kept,
        "default_page": ContinuousBatchingConfig().page_size,
        "unused": {size: predict.unused_slots(tokens, size) for size in (16, ContinuousBatchingConfig().page_size)},
    }
