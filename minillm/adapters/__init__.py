"""Adapters: small matrices beside frozen layers, which learn what the whole model would have to. Reading path:

    lora.py         the layer: base(x) + scale · (x Aᵀ) Bᵀ
    dropout.py      of what A reads: masks that do not depend on who computes them
    attach.py       which layers have one; merge, unmerge, switch off
    parallel.py     beside layers that are cut over ranks, and codes.py: beside codes that are
    start.py        the values that a run starts from: a folder's, NF4 codes of them, and those of adapters
    peft_folder.py  a folder of peft's, in and out

Trained by `minillm.train` (`python -m minillm train --base DIR --lora 16`), with any layout of ranks. Many of them are
served beside one base:

    grouped.py      adapters of different ranks in one batch: a slice of rows and two thin products for each
    routed.py       a model whose passes add them, without a layer being replaced
    store.py        which are on the device, within a budget: `LLM(model, adapters={"french": "adapters/french"})`
    ../serve/run/adapters.py    what the engine asks of them
    cut.py          what a rank keeps of them beside its part of a model
    ../serve/ranks/adapters.py  what the ranks do with that
"""

from minillm.adapters.attach import adapters, attach, detach, merge, switched_off, unmerge
from minillm.adapters.lora import LoraConfig, LoraLinear

__all__ = ["LoraConfig", "LoraLinear", "adapters", "attach", "detach", "merge", "switched_off", "unmerge"]
