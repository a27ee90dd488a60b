"""Hugging Face model folders in and out. Reading path:

    load.py      load_hf: what a folder must hold, and its tensors into the model one by one
    families.py  config.json as a `ModelConfig` and back; the names of tensors
    rope.py      the RoPE keys of config.json, in their many spellings
    experts.py   mixtures of experts: their keys, and where each expert's matrices are stored
    weights.py   safetensors, in one file or in shards

save.py is the way back, save_hf; write.py makes the files of a folder, all or nothing.
generation_config.py reads how the authors of a model sample from it.
"""

from minillm.model.hf.load import load_hf
from minillm.model.hf.save import save_hf

__all__ = ["load_hf", "save_hf"]
