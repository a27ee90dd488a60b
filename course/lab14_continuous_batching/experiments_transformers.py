"""Lab 14's peer: the same requests through transformers' continuous batching, where transformers is installed."""

import logging
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from course.shared.measuring import one_thread
from minillm.bench.load import Arrival
from minillm.model.generate import folder_of


@one_thread()
def peer(
    arrivals: Sequence[Arrival], *, max_num_seqs: int, token_budget: int, num_blocks: int = 256
) -> dict[str, Any] | None:
    """Answers, forward passes and seconds of transformers' manager on the draft checkpoint; None without transformers.

    It works in a thread of its own, which `torch.inference_mode` does not reach: call it outside of one.
    """
    if find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers import logging as chatter

    chatter.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder_of("draft"), dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=None)
    limits = {"page_size": 16, "num_blocks": num_blocks, "max_batch_tokens": token_budget}
    config = ContinuousBatchingConfig(max_requests_per_batch=max_num_seqs, **limits)
    manager = model.eval().init_continuous_batching(continuous_batching_config=config)
    manager.warmup()
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    manager.start()
    try:
        started, found = time.perf_counter(), {}
        names = [manager.add_request(each.prompt, max_new_tokens=each.params.max_tokens) for each in arrivals]
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("the manager's thread ended before its requests")
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - started
    finally:
        manager.stop(block=True)
        manager.destroy()
        hook.remove()
    return {"ids": [found[name] for name in names], "passes": len(passes), "seconds": seconds}
