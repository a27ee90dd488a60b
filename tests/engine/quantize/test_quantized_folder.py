"""Folders in the layouts of compressed-tensors: written, read, refused, and loaded by transformers."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.model import ModelConfig, MoEConfig, Transformer, load_hf, save_hf
from minillm.quantize import NF4, Float8, Int, Settings, kernels, quantize, quantized_layers
from minillm.quantize.folder import save_quantized
from minillm.quantize.words import from_words, to_words

PACKED4 = Int(bits=4, group=32, symmetric=False)
FORMATS = {
    "int4": (Settings(Int(bits=4, group=32)), "pack-quantized"),
    "int4 with zero points": (Settings(PACKED4), "pack-quantized"),
    "int8": (Settings(Int()), "pack-quantized"),
    "int8 in groups": (Settings(Int(bits=8, group=32, symmetric=False)), "pack-quantized"),
    "w8a8": (Settings(Int(), "smoothquant"), "int-quantized"),
    "float8": (Settings(Float8()), "float-quantized"),
    "some layers": (Settings(Int(bits=4, group=32), skip=("o_proj", "blocks.1.mlp")), "pack-quantized"),
}
FAMILIES = {
    "llama": {},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "phi3": {"rotary_dim": 8},
    "mixtral": {"moe": MoEConfig(4, 2, intermediate_size=96)},
}


@pytest.fixture(autouse=True)
def without_gradients():
    """As in use: with them, layers dequantize, and no packed kernel would run."""
    with torch.no_grad():
        yield


def quantized(family="llama", settings=FORMATS["int4"][0]):
    options = {"num_kv_heads": 2, "max_seq_len": 64, "init_std": 0.2} | FAMILIES[family]
    model = Transformer(ModelConfig(96, 64, 96, 2, 4, **options), seed=3)
    quantize(model, settings, ids())
    return model


def ids():
    return torch.randint(96, (4, 24), generator=torch.Generator().manual_seed(5))


def dequantizing(model):
    for layer in quantized_layers(model).values():
        layer.use(kernels.DEQUANTIZE)
    return model


def near(logits, expected):
    """To bfloat16's rounding, in which packed kernels multiply, for most tokens: it may send one to another expert."""
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read_back_to_the_bit(name, tmp_path):
    settings, layout = FORMATS[name]
    model = quantized(settings=settings)
    save_quantized(model, tmp_path / "out")
    found = load_hf(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["format"] == layout
    assert quantized_layers(found).keys() == quantized_layers(model).keys()
    for layer in quantized_layers(found):
        ours, theirs = (each.get_submodule(layer) for each in (model, found))
        assert torch.equal(ours.unpacked(), theirs.unpacked()) and torch.equal(ours.weight, theirs.weight)
        assert (ours.kernel, ours.nbytes, ours.format) == (theirs.kernel, theirs.nbytes, theirs.format)
    logits = model(ids())
    assert torch.equal(found(ids()), logits) and near(logits, dequantizing(model)(ids()))
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_biases_fused_tensors_and_experts(family, tmp_path):
    model = quantized(family, Settings(PACKED4))
    save_quantized(model, tmp_path / "out")
    logits = model(ids())
    assert torch.equal(load_hf(tmp_path / "out")(ids()), logits) and near(logits, dequantizing(model)(ids()))


@pytest.mark.parametrize(
    ("family", "name"), [("llama", each) for each in FORMATS] + [("qwen3", "int4 with zero points"), ("qwen3", "int8")]
)
def test_transformers_computes_the_same_logits(family, name, tmp_path):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    settings, more = FORMATS[name][0], {}
    if "zero" in name or "groups" in name:
        # transformers 5.24 expects zero points unpacked, unless it dequantizes, which it does in the scales' dtype
        more["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        settings = replace(settings, format=replace(settings.format, scale_dtype=torch.float32))
    model = dequantizing(quantized(family, settings))
    save_quantized(model, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **more)
    with torch.no_grad():
        expected = theirs(ids()).logits
    assert (model(ids()) - expected).abs().max() < 1e-3 < 1e-2 * expected.abs().max()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, None)])
def test_a_folder_that_compressed_tensors_wrote_is_read(bits, group, symmetric, tmp_path):
    """Weights rounded and packed by their code; ours computes with what they say the weights are."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle import forward as lifecycle

    model = Transformer(ModelConfig(96, 64, 96, 2, 4, num_kv_heads=2, max_seq_len=64, init_std=0.2), seed=3)
    save_hf(model, tmp_path)
    kind = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor, tensors = BaseCompressor.get_value_from_registry("pack-quantized"), {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = weight
            continue
        format = Int(bits=bits, group=group, symmetric=symmetric, scale_dtype=torch.float32)
        scale, zero = format.grid(weight)
        zero = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero.to(torch.int8)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(given, scheme)
        tensors |= {name.removesuffix("weight") + part: each for part, each in stored.items()}
        place = model.get_submodule(
            name.removesuffix(".weight").replace("model.layers", "blocks").replace("self_attn", "attention")
        )
        rounded = lifecycle.dequantize(lifecycle.quantize(weight, scale, zero, args), scale, zero, args)
        place.weight.data = rounded.float()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    group_0 = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group_0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = dequantizing(load_hf(tmp_path, dtype=torch.float32))
    assert len(quantized_layers(found)) == 14
    assert torch.allclose(found(ids()), model(ids()), atol=1e-4)


def as_gptq(codes, scale, zero, group):
    """AutoGPTQ's packing, a code at a time. codes: [out, in] of 0 .. 15; scale, zero: [out, groups]."""
    outputs, inputs = codes.shape
    words = torch.zeros(inputs // 8, outputs, dtype=torch.int64)
    zeros = torch.zeros(inputs // group, outputs // 8, dtype=torch.int64)
    for place in range(inputs):
        words[place // 8] |= codes[:, place].long() << 4 * (place % 8)
    for output in range(outputs):
        zeros[:, output // 8] |= (zero[output].long() - 1) % 16 << 4 * (output % 8)
    index = (torch.arange(inputs) // group).int()
    return {"qweight": signed(words), "qzeros": signed(zeros), "scales": scale.T.contiguous(), "g_idx": index}


def as_awq(codes, scale, zero, group):
    """AutoAWQ's packing: the output at each place of a word, from the lowest bits up."""
    outputs, inputs = codes.shape
    words = torch.zeros(inputs, outputs // 8, dtype=torch.int64)
    zeros = torch.zeros(inputs // group, outputs // 8, dtype=torch.int64)
    for word in range(outputs // 8):
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, word] |= codes[8 * word + output].long() << 4 * place
            zeros[:, word] |= zero[8 * word + output].long() << 4 * place
    return {"qweight": signed(words), "qzeros": signed(zeros), "scales": scale.T.contiguous()}


def signed(words):
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptqs_and_awqs_own_layouts_are_read(method, tmp_path):
    model, group = Transformer(ModelConfig(96, 64, 96, 2, 4, num_kv_heads=2, max_seq_len=64, init_std=0.2), seed=3), 32
    save_hf(model, tmp_path)
    tensors, draw = {}, torch.Generator().manual_seed(0)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = weight
            continue
        codes = torch.randint(0, 16, weight.shape, generator=draw)
        zero = torch.randint(0, 16, (len(weight), weight.shape[1] // group), generator=draw)
        scale = (torch.rand(zero.shape, generator=draw) * 0.05 + 0.01).half()
        stored = (as_gptq if method == "gptq" else as_awq)(codes, scale, zero, group)
        tensors |= {name.removesuffix("weight") + part: each for part, each in stored.items()}
        place = name.removesuffix(".weight").replace("model.layers", "blocks").replace("self_attn", "attention")
        spread = [each.float().repeat_interleave(group, 1) for each in (zero, scale)]
        model.get_submodule(place).weight.data = (codes - spread[0]) * spread[1]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": group, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = dequantizing(load_hf(tmp_path))
    assert len(quantized_layers(found)) == 14 and torch.allclose(found(ids()), model(ids()), atol=1e-3)
    save_quantized(found, tmp_path / "again")
    assert torch.allclose(dequantizing(load_hf(tmp_path / "again"))(ids()), model(ids()), atol=1e-3)
    if method == "gptq":
        tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"the groups of .*q_proj.weight are out of order \(desc_act\): load"):
            load_hf(tmp_path)
    edited(tmp_path, bits=3)
    with pytest.raises(ValueError, match=f"quantization_config of {method} has 3 bits"):
        load_hf(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 33])
def test_words_hold_codes_from_their_lowest_bits_up(bits, size):
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, size)).to(torch.int8)
    words = to_words(codes, bits)
    each = 32 // bits
    for row in range(3):
        for place in range(size):
            word = int(words[row, place // each]) % 2**32
            assert (word >> place % each * bits) % 2**bits - 2 ** (bits - 1) == int(codes[row, place])
    assert torch.equal(from_words(words, bits, size), codes)


def edited(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        place = raw["quantization_config"]
        *before, last = path.split("__")
        for key in before:
            place = place[key]
        place[last] = value
    (folder / "config.json").write_text(json.dumps(raw))


def with_config_of(value):
    def write(folder):
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": value}))

    return write


def without(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"
BROKEN = {
    "no object": (
        with_config_of(["gptq"]),
        r"quantization_config \['gptq'\] is not an object: download the folder again",
    ),
    "no object, either": (with_config_of("gptq"), "quantization_config 'gptq' is not an object"),
    "other method": (lambda f: edited(f, quant_method="aqlm"), "not supported in the layout of 'aqlm': load one in"),
    "unknown format": (lambda f: edited(f, format="marlin-24"), "has format 'marlin-24', int of 4 bits by 'group'"),
    "3 bits": (lambda f: edited(f, config_groups__group_0__weights__num_bits=3), "bits 3 is not supported"),
    "index of groups": (lambda f: edited(f, config_groups__group_0__weights__actorder="group"), "without an index of"),
    "no groups": (lambda f: edited(f, config_groups={}), "has 0 kinds of layers"),
    "group size": (
        lambda f: edited(f, config_groups__group_0__weights__group_size=48),
        "group 48 does not divide the 64 inputs",
    ),
    "kv cache": (lambda f: edited(f, kv_cache_scheme={"num_bits": 8}), "has kv_cache_scheme: load a folder"),
    "inputs": (
        lambda f: edited(f, config_groups__group_0__input_activations={"num_bits": 4}),
        "rounds inputs otherwise",
    ),
    "half written": (lambda f: without(f, f"{Q}.weight_scale"), rf"lacks tensor {Q}.weight_scale: its checkpoint is"),
    "codes missing": (lambda f: without(f, f"{Q}.weight_packed"), rf"lacks tensor {Q}.weight"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-99]),
        "is truncated or not a safetensors file",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_whole_or_not_covered_is_refused_in_one_sentence(case, tmp_path):
    breaks, message = BROKEN[case]
    save_quantized(quantized(), tmp_path / "out")
    breaks(tmp_path / "out")
    with pytest.raises(ValueError, match=message) as caught:
        load_hf(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_nothing_is_left_of_a_save_that_fails(tmp_path, monkeypatch):
    model = quantized()
    monkeypatch.setattr("minillm.model.hf.write.save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_quantized(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_something_and_formats_without_a_layout_are_refused(tmp_path):
    save_hf(Transformer(ModelConfig(96, 64, 96, 1, 4), seed=0), tmp_path / "plain")
    before = sorted(os.listdir(tmp_path / "plain"))
    with pytest.raises(ValueError, match="holds something already: name a new folder"):
        save_quantized(quantized(), tmp_path / "plain")
    assert sorted(os.listdir(tmp_path / "plain")) == before
    with pytest.raises(ValueError, match="no layout for NF4: use integers or float8"):
        save_quantized(quantized(settings=Settings(NF4(group=32))), tmp_path / "out")
    with pytest.raises(ValueError, match=r"lacks blocks.0.attention.k_proj.weight: save a quantized one with"):
        save_hf(quantized(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["plain"]
