"""Hugging Face's peft over three folders that minillm wrote: a batch in which each row has an adapter of its own."""

import tempfile
import warnings

import torch

from course.lab17_adapters.experiments import target
from course.lab17_adapters.experiments_serving import BEGINNING, folders, merged_model
from minillm.model import save_hf


def mixed_batch() -> float:
    """Largest relative difference between peft's logits and those of our merged models."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as chatter

    chatter.disable_progress_bar()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # of transformers, about itself

    tokens = torch.tensor([BEGINNING])
    with tempfile.TemporaryDirectory() as base, folders() as found, torch.no_grad():
        save_hf(target(), base)
        theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        (first, *others), paths = found, {name: str(folder) for name, folder in found.items()}
        model = PeftModel.from_pretrained(theirs, paths[first], adapter_name=first)
        for name in others:
            model.load_adapter(paths[name], adapter_name=name)
        model.eval()
        logits = model(tokens.expand(len(found), -1), adapter_names=list(found)).logits
        right = torch.cat([merged_model(folder)(tokens) for folder in found.values()])
    return float(((logits - right).norm(dim=(1, 2)) / right.norm(dim=(1, 2))).max())
