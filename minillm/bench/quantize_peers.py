"""What others make of the same weights: torchao's layers, and llama.cpp over a GGUF file written here."""

import copy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from minillm.model import Transformer

OF_BLOCK = {  # GGUF's names
    "attention_norm": "attn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def by_torchao(model: Transformer) -> Transformer:
    """A copy whose layers in the blocks are torchao's, int8 weights per channel."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    copied = copy.deepcopy(model).bfloat16()  # what its kernel on the CPU is for
    quantize_(copied, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear) and "blocks" in name)
    return copied


def has_llama_cpp() -> bool:
    return all(find_spec(name) for name in ("llama_cpp", "gguf"))


def write_gguf(model: Transformer, path: Path, kind: str) -> None:
    """A plain Llama's weights for llama.cpp, without a tokenizer. kind: of the matrices, "F32", "Q8_0" or "Q4_0"; the
    embedding is Q8_0 where those are Q4_0, as llama.cpp's own tool keeps it better than the rest."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)

    def add(name: str, tensor: Tensor, kind: str) -> None:
        type_of, values = gguf.GGMLQuantizationType[kind], tensor.detach().float().numpy()
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, type_of), raw_dtype=type_of)

    add("token_embd", model.embedding.weight, "Q8_0" if kind == "Q4_0" else kind)
    add("output_norm", model.norm.weight, "F32")
    for number, block in enumerate(model.blocks):
        for ours, theirs in OF_BLOCK.items():
            weight = block.get_submodule(ours).weight
            if ours.endswith(("q_proj", "k_proj")):
                weight = _side_by_side(weight, config.head_dim)
            add(f"blk.{number}.{theirs}", weight, "F32" if weight.dim() == 1 else kind)
    if model.head is not None:
        add("output", model.head.weight, "Q8_0" if kind == "Q4_0" else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _side_by_side(weight: Tensor, head_dim: int) -> Tensor:
    """[heads · head_dim, in]: llama.cpp rotates neighbours, we rotate a head's first half with its second."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class LlamaCpp:
    """llama.cpp over a GGUF file, through its C interface, on as many threads as torch has. length: of the context."""

    def __init__(self, path: Path, length: int):
        import llama_cpp

        self.library = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)  # kept: the library calls it
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}.")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = length
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def logits(self, tokens: list[int]) -> Tensor:
        """[vocab_size], of the token after these, which go on from those before."""
        batch = self.library.llama_batch_get_one((self.library.llama_token * len(tokens))(*tokens), len(tokens))
        if status := self.library.llama_decode(self.context, batch):
            raise ValueError(f"llama.cpp did not decode: status {status}.")
        found = self.library.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(found, (self.vocab_size,)).copy())

    def generate(self, prompt: list[int], new: int) -> list[int]:
        """The likeliest tokens, from an empty context."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        tokens, found = prompt, []
        for _ in range(new):
            found.append(int(self.logits(tokens).argmax()))
            tokens = found[-1:]
        return found
