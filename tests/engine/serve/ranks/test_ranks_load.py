"""A rank reads its own bytes of a folder, and what it holds is the part of the whole model that is its own."""

import json
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open

from minillm.comm import launch
from minillm.model import ModelConfig, Transformer, load_hf, save_hf
from minillm.model.config import MoEConfig
from minillm.model.hf import weights
from minillm.parallel.tensor_parallel.load import load_part
from minillm.parallel.tensor_parallel.parallelize import tensor_parallel
from minillm.parallel.tensor_parallel.quantized import cut_quantized
from minillm.predict.serving.ranks import weight_bytes
from minillm.quantize.folder import save_quantized
from minillm.quantize.formats import NF4, Float8, Int
from minillm.quantize.in_place import Settings, nbytes, quantize, quantized_layers
from minillm.serve import SamplingParams, over_ranks
from minillm.serve.ranks.part import as_part, part_config

PLAIN = ModelConfig(500, 64, 128, 2, 8, 2, max_seq_len=64, init_std=0.2)
FOLDERS = {
    "plain": PLAIN,
    "tied, biases, uneven": ModelConfig(
        501, 64, 130, 2, 8, 4, max_seq_len=64, init_std=0.2, tie_embeddings=True, qkv_bias=True
    ),
    "experts": ModelConfig(500, 64, 128, 2, 8, 4, max_seq_len=64, init_std=0.2, moe=MoEConfig(4, 2)),
}


class Counted:
    """An open file of tensors that notes the bytes of what is taken from it."""

    taken = 0

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def get_slice(self, name):
        return CountedSlice(self.file.get_slice(name))

    def get_tensor(self, name):
        return _noted(self.file.get_tensor(name))


class CountedSlice(Counted):
    def __getitem__(self, ranges):
        return _noted(self.file[ranges])


def _noted(tensor):
    Counted.taken += tensor.nbytes
    return tensor


@contextmanager
def counting():
    opened, Counted.taken = weights._open, 0
    weights._open = lambda path: Counted(safe_open(path, framework="pt"))
    try:
        yield
    finally:
        weights._open = opened


def read_part(group, folder, ep=False):
    with counting():
        model, said = load_part(folder, group, whole_experts=ep)
    whole = load_hf(folder)
    if quantized_layers(whole):
        cut = cut_quantized(whole, group)
    else:
        cut = tensor_parallel(whole, whole.config, group, whole_experts=ep)
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(model(tokens), cut(tokens))
    names = dict(cut.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, names.pop(name)), name
    assert not names
    return Counted.taken, said, nbytes(model)


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        pytest.param("plain", 4, False, marks=pytest.mark.full),
        ("tied, biases, uneven", 4, False),
        ("experts", 2, False),
        ("experts", 2, True),
    ],
)
def test_a_rank_reads_its_own_bytes(name, tp, ep, tmp_path):
    config = FOLDERS[name]
    save_hf(Transformer(config, seed=1), tmp_path / "model", max_shard_bytes=100_000)
    whole = nbytes(Transformer(config, seed=1))
    ranks = launch(read_part, tp, tmp_path / "model", ep)
    for taken, said, held in ranks:
        assert said <= held <= weight_bytes(config, tp, 4)
        assert taken <= 1.05 * held and taken - said <= 4 * config.hidden_size  # one row says the type
    assert max(said for _, said, _ in ranks) < 0.62 * whole


FORMATS = {
    "int4 in words": (Int(bits=4, group=16), 1.05),
    "int4 with zeros": (Int(bits=4, group=16, symmetric=False), 1.05),
    "int8": (Int(), 1.05),
    "float8": (Float8(), 1.05),
    "a part of a word": (Int(bits=4, group=4), 4.0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "int4 with zeros")) for name in FORMATS]
)
def test_a_rank_reads_its_own_codes(name, tmp_path):
    format, most = FORMATS[name]
    model = Transformer(ModelConfig(64, 64, 128 if most < 2 else 112, 1, 8, 4, max_seq_len=64, init_std=0.2), seed=1)
    quantize(model, Settings(format))
    save_quantized(model, tmp_path / "model")
    for taken, said, held in launch(read_part, 4, tmp_path / "model"):
        assert said <= taken <= said + 4 * 64 + 64 and taken <= most * held


@pytest.mark.full
def test_fused_and_older_layouts_are_read_in_parts(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 200, "max_position_embeddings": 64, "pad_token_id": 0}
    config = transformers.Phi3Config(**sizes)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "model")
    for taken, said, held in launch(read_part, 4, tmp_path / "model"):
        assert taken <= 1.05 * held and said <= held


def generated(group, folder, params):
    return over_ranks(group, folder, lambda llm: [a.ids for a in llm.generate([[1, 2, 3]], params)[0].answers])


def test_an_engine_of_a_folder_answers_as_one_process(tmp_path):
    from minillm.data import Tokenizer
    from minillm.model.generate import folder_of, generate

    source = folder_of("draft")
    assert Tokenizer.load(source)
    expected = list(generate(load_hf(source, dtype=torch.float32), [1, 2, 3], 12))
    for tp in (2, 4):
        assert launch(generated, tp, source, SamplingParams(12))[0] == [expected]


def test_a_part_has_its_heads_and_the_whole_vocabulary():
    for tp, heads, kv_heads in ((1, 8, 2), (2, 4, 1), (8, 1, 1)):
        part = part_config(PLAIN, tp)
        assert (part.num_heads, part.num_kv_heads, part.head_dim) == (heads, kv_heads, 8)
        assert (part.vocab_size, part.max_seq_len) == (PLAIN.vocab_size, PLAIN.max_seq_len)


def refused(group, cases):
    return [refusal(group, *case) for case in cases]


def refusal(group, format, method, inter):
    model = Transformer(ModelConfig(64, 64, inter, 1, 8, 4, max_seq_len=64), seed=1)
    quantize(model, Settings(format, method), torch.arange(60)[None] if method == "smoothquant" else None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        as_part(cut_quantized(model, group), group)
    except ValueError as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return str(error)


def test_codes_that_cannot_be_cut_are_refused():
    cases = [
        (Int(bits=4, group=32), "rtn", 64, "64 inputs in groups of 32, which do not divide over 4 ranks"),
        (Int(), "smoothquant", 128, "rounds whole rows of inputs, of which a rank has a part"),
        (NF4(), "rtn", 128, "64 inputs in groups of 64, which do not divide over 4 ranks"),
        (Int(), "rtn", 130, "which do not divide over 4 ranks"),
    ]
    for texts in launch(refused, 4, [case for *case, _ in cases]):
        assert all(said in text for text, (*_, said) in zip(texts, cases, strict=True)), texts


def test_a_folder_of_another_kind_is_refused(tmp_path):
    save_hf(Transformer(PLAIN, seed=1), tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3}))
    with pytest.raises(Exception, match="lacks tensor"):
        launch(read_part, 2, tmp_path / "model")
