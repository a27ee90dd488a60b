"""Lab 15's peer: the same pair through transformers' assisted generation, where transformers is installed."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from course.lab15_speculative_decoding.experiments import NEW
from course.shared.measuring import one_thread
from minillm.model.generate import folder_of

PLAIN, DRAFT, LOOKUP = "greedy", "assistant_model", "prompt_lookup_num_tokens"


@torch.no_grad()
def peers(asked: Sequence[Sequence[int]], k: int, lookup: int) -> dict[str, tuple[list[list[int]], int]] | None:
    """{way: (answers, passes of the target)}, greedy; None without transformers. Its own ways to change the number of
    draft tokens (a schedule, a threshold of confidence) are switched off."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers import logging as chatter

    chatter.disable_progress_bar()
    loudness = chatter.get_verbosity()
    chatter.set_verbosity_error()  # its own calls of itself are warned of
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    plain = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW)
    target.generation_config = draft.generation_config = plain
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    found = {}
    with one_thread():
        for way, options in ((PLAIN, {}), (DRAFT, {DRAFT: draft}), (LOOKUP, {LOOKUP: lookup})):
            passes.clear()
            answers = []
            for prompt in asked:
                ids = torch.tensor([list(prompt)])
                mask = torch.ones_like(ids)
                answers.append(target.generate(ids, attention_mask=mask, **options)[0, len(prompt) :].tolist())
            found[way] = answers, len(passes)
    chatter.set_verbosity(loudness)
    return found
