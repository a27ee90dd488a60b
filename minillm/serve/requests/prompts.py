"""Prompts as they are given: which params and which adapter are whose, and a prompt's token ids."""

from typing import TYPE_CHECKING

from minillm.data import Tokenizer
from minillm.model import ModelConfig
from minillm.serve.numbers import whole_numbers
from minillm.serve.requests.params import SamplingParams

if TYPE_CHECKING:
    from minillm.adapters.store import AdapterStore, Registered


def pairs(prompts: list[str | list[int]], params: SamplingParams | list[SamplingParams] | None) -> list[tuple]:
    """(prompt, its params) of each; params: for all, or one for each."""
    if isinstance(prompts, str):
        raise ValueError("prompts is one text: give a list of prompts.")
    each = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(each)} params: give one for all, or one for each.")
    return list(zip(prompts, each, strict=True))


def prompt_ids(
    prompt: str | list[int], params: SamplingParams, tokenizer: Tokenizer | None, config: ModelConfig
) -> list[int]:
    """The prompt's token ids; ValueError if the model cannot take them."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params {params!r} must be SamplingParams, or None for the defaults.")
    if tokenizer is None and (isinstance(prompt, str) or params.stop):
        what = "the prompt" if isinstance(prompt, str) else f"stop {params.stop!r}"
        raise ValueError(f"{what} is text and this LLM has no tokenizer: pass tokenizer=, or token ids.")
    if isinstance(prompt, str):
        tokens = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    else:
        tokens = None if isinstance(prompt, set | frozenset) else whole_numbers(prompt)
        if tokens is None:
            raise ValueError(f"the prompt {prompt!r} must be a text or a list of token ids.")
    if not 0 < len(tokens) < config.max_seq_len:
        raise ValueError(f"a prompt of {len(tokens)} tokens does not fit: use 1 to {config.max_seq_len - 1}.")
    for token in (*tokens, *params.stop_tokens, *params.first_tokens):
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token id {token} is outside 0 .. {config.vocab_size - 1} (the vocabulary).")
    return list(tokens)


def adapter_of_each(prompts: list[str | list[int]], adapter: str | list[str | None] | None) -> list[str | None]:
    """The name of each prompt's adapter. adapter: for all, or one for each."""
    each = list(adapter) if isinstance(adapter, list | tuple) else [adapter] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(each)} adapters: give one for all, or one for each.")
    return each


def registered(store: "AdapterStore | None", name: str | None) -> "Registered | None":
    """Of a request's adapter; ValueError if it cannot be served."""
    if name is None:
        return None
    if store is None:
        raise ValueError(f"no adapter {name!r} here: give the LLM its folder, adapters={{{name!r}: ...}}.")
    return store.registered(name)
