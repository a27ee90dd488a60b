"""The RoPE part of config.json, in its several spellings, to and from the fields of `ModelConfig`.

transformers 5 writes `rope_parameters` (Gemma 3: one per kind of layer), older versions `rope_theta`, `rope_scaling`,
and for Gemma 3 `rope_local_base_freq`. Both are read, both are written.
"""

import math
from typing import Any

from minillm.model.config import ROPE_KINDS, ModelConfig, RopeScaling

ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
ORIGINAL = "original_max_position_embeddings"
NEEDED = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
NEEDED |= {"yarn": (), "longrope": ("short_factor", "long_factor")}
OPTIONAL = {"linear": (), "dynamic": (), "llama3": (ORIGINAL,), "longrope": ("factor", "attention_factor", ORIGINAL)}
OPTIONAL["yarn"] = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
OPTIONAL["yarn"] += (ORIGINAL,)


def read_rope(values: dict, kind: str, max_seq_len: int | None) -> dict[str, Any]:
    """rope_theta, rope_scaling, rotary_dim, sliding_rope_theta and max_seq_len of a `ModelConfig`.

    values: config.json with the defaults of its family filled in. ValueError, naming the key, for other kinds of RoPE.
    """
    sliding_theta = None
    rope = dict(values["rope_scaling"] or values["rope_parameters"] or {})
    if kind == "gemma3_text":
        rope, sliding_theta = _of_gemma3(values)
    theta = rope.get("rope_theta", values["rope_theta"])
    rope = {key: value for key, value in rope.items() if value is not None}
    name = rope.get("rope_type", rope.get("type", "default"))
    if name == "su" or (name == "yarn" and kind == "phi3"):  # what old Phi-3 folders call it
        name = "longrope"
    head_dim = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    share = rope.get("partial_rotary_factor", values["partial_rotary_factor"])
    if share not in (None, 1) and kind != "phi3":
        raise ValueError(f"partial_rotary_factor is not supported for {kind}: every dimension of a head is rotated.")
    scaling = None if name == "default" else _scaling(rope, name, values)
    if name == "default" and (extra := rope.keys() - ALWAYS - {ORIGINAL}):
        raise ValueError(f"rope key {min(extra)!r} is not known for rope type 'default'.")
    return {
        "rope_theta": 10000.0 if theta is None else theta,
        "rope_scaling": scaling,
        "rotary_dim": None if share is None else int(head_dim * share),
        "sliding_rope_theta": sliding_theta,
        "max_seq_len": _context(values["max_position_embeddings"], scaling, max_seq_len),
    }


def write_rope(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The keys of config.json for a model of this family, for old and new transformers."""
    scaling, theta = config.rope_scaling, {"rope_theta": config.rope_theta}
    rope: dict[str, Any] = {"rope_type": "default"}
    positions = config.max_seq_len
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        if scaling.kind == "longrope":
            rope |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
            positions = round(scaling.original_max_seq_len * scaling.factor)
        if scaling.kind in ("yarn", "longrope"):
            rope["attention_factor"] = scaling.attention_factor
        if scaling.kind in ("llama3", "yarn", "longrope"):
            rope[ORIGINAL] = scaling.original_max_seq_len
        if scaling.kind == "dynamic":
            positions = scaling.original_max_seq_len
    raw = {"max_position_embeddings": positions, **theta, "rope_scaling": rope if scaling else None}
    if kind == "phi3":
        share = {"partial_rotary_factor": (config.rotary_dim or config.head_dim) / config.head_dim}
        rope |= share
        raw |= share | {ORIGINAL: positions if scaling is None else scaling.original_max_seq_len}
    if kind == "gemma3_text":
        local = config.rope_theta if config.sliding_rope_theta is None else config.sliding_rope_theta
        sliding = {"rope_type": "default", "rope_theta": local}
        both = {"full_attention": rope | theta, "sliding_attention": sliding}
        return raw | {"rope_parameters": both, "rope_local_base_freq": local}
    return raw | {"rope_parameters": rope | theta}


def _scaling(rope: dict, name: str, values: dict) -> RopeScaling:
    if name not in ROPE_KINDS:
        raise ValueError(f"RoPE scaling {name!r} is not supported: use one of {', '.join(ROPE_KINDS)}.")
    if missing := [key for key in NEEDED[name] if key not in rope]:
        raise ValueError(f"rope key {missing[0]!r} is missing, which rope type {name!r} needs.")
    if extra := sorted(rope.keys() - ALWAYS - set(NEEDED[name]) - set(OPTIONAL[name])):
        raise ValueError(f"rope key {extra[0]!r} is not known for rope type {name!r}.")
    positions = values["max_position_embeddings"]
    original = rope.get(ORIGINAL, values[ORIGINAL] or positions)
    if ORIGINAL in OPTIONAL[name] and values[ORIGINAL] not in (None, original):
        raise ValueError(f"{ORIGINAL} is {values[ORIGINAL]}, but {original} in the RoPE scaling: delete the wrong one.")
    if name == "linear":
        return RopeScaling(name, rope["factor"])
    if name == "dynamic":
        return RopeScaling(name, rope["factor"], original_max_seq_len=positions)
    if name == "llama3":
        return RopeScaling(name, *(rope[key] for key in NEEDED[name]), original_max_seq_len=original)
    factor = rope.get("factor", positions / original)
    if name == "yarn":
        betas = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate") if key in rope}
        attention = rope.get("attention_factor", _yarn_attention(factor, rope))
        return RopeScaling(name, factor, original_max_seq_len=original, attention_factor=attention, **betas)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        name,
        positions / original,
        original_max_seq_len=original,
        attention_factor=rope.get("attention_factor", attention),
        short_factors=rope["short_factor"],
        long_factors=rope["long_factor"],
    )


def _yarn_attention(factor: float, rope: dict) -> float:
    """Peng et al. 2023, equation 22, with DeepSeek's two exponents where they are given."""

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    return of(both[0]) / of(both[1]) if all(both) else of(1.0)


def _of_gemma3(values: dict) -> tuple[dict, float]:
    """(RoPE of the full-attention layers, theta of the sliding ones). The two spellings may be mixed."""
    nested = values["rope_parameters"] or {}
    if extra := sorted(nested.keys() - {"full_attention", "sliding_attention"}):
        raise ValueError(f"rope_parameters key {extra[0]!r} is not known: gemma3_text has one per layer type.")
    theta, local = values["rope_theta"] or 1_000_000.0, values["rope_local_base_freq"] or 10_000.0
    full = {"rope_theta": theta} | (nested.get("full_attention") or {}) | (values["rope_scaling"] or {})
    sliding = {"rope_theta": local} | (nested.get("sliding_attention") or {})
    if sliding.get("rope_type", "default") != "default":
        raise ValueError(f"RoPE scaling {sliding['rope_type']!r} of sliding layers is not supported for gemma3_text.")
    return full, sliding["rope_theta"]


def _context(positions: int, scaling: RopeScaling | None, wanted: int | None) -> int:
    """A model has one set of frequencies, so a longrope model is loaded for short or for long sequences."""
    kind = None if scaling is None else scaling.kind
    if wanted is None:
        return min(positions, scaling.original_max_seq_len) if kind == "longrope" else positions
    if wanted > positions and kind != "dynamic":
        raise ValueError(f"max_seq_len {wanted} is above max_position_embeddings {positions}: use at most that.")
    return wanted
