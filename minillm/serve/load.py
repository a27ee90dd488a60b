"""A Hugging Face folder as the arguments of an `LLM`: weights, tokenizer, and how its authors sample from it."""

from collections.abc import Mapping
from pathlib import Path

import torch

from minillm.data import Tokenizer
from minillm.model import Transformer, load_hf
from minillm.model.generate import folder_of
from minillm.model.hf.generation_config import read_generation_config
from minillm.quantize.head import quantize_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # as commands name them


def engine_options(
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    max_seq_len: int | None = None,
    int8_head: bool = False,
    **options,
) -> dict:
    """model, as `load_model` has it, tokenizer and generation, beside the other options, which win. Adapters that are
    given as folders become a store that refuses those of another base."""
    folder = folder_of(str(folder), option="folder")
    model = load_model(folder, device=device, dtype=dtype, max_seq_len=max_seq_len, int8_head=int8_head)
    found = {"model": model, "tokenizer": Tokenizer.load(folder), "generation": read_generation_config(folder)}
    if isinstance(adapters := options.get("adapters"), Mapping):
        from minillm.adapters.store import AdapterStore, fingerprint_of

        options["adapters"] = AdapterStore(model, adapters, fingerprint=fingerprint_of(folder))
    return found | options


def load_model(
    folder: Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    max_seq_len: int | None = None,
    int8_head: bool = False,
) -> Transformer:
    """device: None = the current GPU, without one the CPU. dtype: None = the checkpoint's on a GPU, float32 on the CPU;
    "auto" = the checkpoint's. max_seq_len: the context; None = the checkpoint's. int8_head: logits come from int8 codes
    of the head."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_hf(folder, device=device, dtype=dtype_of(dtype, device), max_seq_len=max_seq_len)
    if int8_head:
        quantize_head(model)
    return model


def dtype_of(dtype: torch.dtype | str | None, device: torch.device | str) -> torch.dtype | None:
    """What `load_hf` is to be given, where None = the checkpoint's. dtype: as of `load_model`."""
    if dtype == "auto":
        return None
    return torch.float32 if dtype is None and torch.device(device).type == "cpu" else dtype
