"""How a checkpoint wants to be sampled and what ends its answers: generation_config.json, and config.json behind it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

SAMPLING = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
INERT = frozenset(("do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "max_length", "max_new_tokens"))
INERT |= {"transformers_version", "use_cache", "cache_implementation", "decoder_start_token_id", "trust_remote_code"}


@dataclass(frozen=True)
class GenerationDefaults:
    """eos_ids: tokens that end an answer. sampling: fields of `SamplingParams`. unused: keys that change what
    transformers generates and that minillm does not support."""

    eos_ids: tuple[int, ...] = ()
    sampling: dict[str, float | int | None] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """The defaults of a Hugging Face folder; without generation_config.json greedy decoding, with the end tokens that
    config.json names.

    With do_sample false or missing decoding is greedy, as in transformers, whatever temperature says.
    ValueError for a file that is not valid JSON or an end token that is no number.
    """
    raw, config = (_read(Path(folder) / name) for name in ("generation_config.json", "config.json"))
    eos = raw.get("eos_token_id", config.get("eos_token_id"))
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and token >= 0 for token in eos):
        raise ValueError(f"eos_token_id {eos!r} of {folder} must be a token id or a list of token ids.")
    given = {key: value for key, value in raw.items() if value is not None and not key.startswith("_")}
    sampling = {key: given.get(key, SAMPLING[key]) for key in SAMPLING}
    if not raw.get("do_sample"):
        sampling |= {"temperature": 0.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
    sampling["top_k"] = sampling["top_k"] or None  # 0 keeps every token
    return GenerationDefaults(
        tuple(eos),
        {key: value for key, value in sampling.items() if key == "temperature" or value != SAMPLING[key]},
        tuple(sorted(key for key in given.keys() - SAMPLING.keys() - INERT if given[key] is not False)),
    )


def _read(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}).") from error
