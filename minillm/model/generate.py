"""Text from a model, one token at a time: the plainest decoder there is. `minillm.serve` does it for many at once.

prompt      t0 t1 t2 t3 | t4 t5 ...         the prompt goes through the model in one pass; then each new token
keys kept   ─────────────▶ ─▶ ─▶            alone, which attends to the keys and values kept of all before it
"""

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minillm.data import Tokenizer
from minillm.model.attention.causal import sdpa
from minillm.model.compiled_decode import FixedCache, compiled_next_logits, next_logits
from minillm.model.config import ModelConfig, check_generates
from minillm.model.draw import Draw, softmax_at
from minillm.model.kernels import gpu_of
from minillm.model.paged.tables import to_device
from minillm.model.transformer import Transformer

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
COMMITTED = ("target", "draft")
RUNS, RUN_FILE = Path("runs"), "run.json"  # where `train` keeps its runs, and what each of them holds


class KVCache:
    """An attention function that keeps keys and values: `model(tokens, positions, attention=cache)`, each token once,
    in order.

    The memory for `length` tokens of `batch` sequences is allocated at once: 2 · layers · kv_heads · head_dim numbers
    per token.
    """

    def __init__(
        self, config: ModelConfig, length: int, *, batch: int = 1, device=None, dtype: torch.dtype | None = None
    ):
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        self.keys, self.values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self._of_layers = list(zip(self.keys, self.values, strict=True))
        self._positions: Tensor | None = None
        self._start = 0

    def begin(self, positions: Tensor, start: int) -> None:
        """The next pass has these positions, the first of which is `start`. Without this call each layer reads it from
        the tensor, for which the host has to wait if that is on a GPU."""
        self._positions, self._start = positions, start

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, positions: Tensor | None, window: int | None, **options
    ) -> Tensor:
        start, seq = self._start if positions is self._positions else int(positions[0]), k.shape[2]
        end = start + seq
        keys, values = (each.narrow(2, 0, end) for each in self._of_layers[layer])
        keys.narrow(2, start, seq).copy_(k)
        values.narrow(2, start, seq).copy_(v)
        if seq == 1 and not options:  # the last token sees all keys of its window, so no mask is needed
            first = 0 if window is None else max(0, end - window)
            return sdpa(q, keys[:, :, first:], values[:, :, first:])
        where = torch.arange(end, device=q.device)
        place = {"positions": positions, "key_positions": where}
        return sdpa(q, keys, values, layer=layer, window=window, **place, **options)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | Collection[int] | None = None,
    first: list[int] | None = None,
    compiled: bool = False,
) -> Iterator[int]:
    """Yields new token ids until `stop` (one token or several), max_new_tokens or the end of the context.

    temperature: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature).
    first: the ids that the first new token is taken from. compiled: passes of one token are one compiled function each,
    see `compiled_decode.py`. ValueError for an empty prompt or one that fills the context, or without a compiler.
    """
    check_generates(model.config)
    room = model.config.max_seq_len - len(prompt)
    if not prompt or room < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens does not fit: use 1 to {model.config.max_seq_len - 1}.")
    if not 0 <= temperature < float("inf") or max_new_tokens < 1:
        raise ValueError(f"temperature {temperature} must be at least 0, max_new_tokens {max_new_tokens} at least 1.")
    stops = stop if isinstance(stop, Collection) else (stop,)
    weight, draw = model.embedding.weight, Draw(seed)
    length = len(prompt) + min(max_new_tokens, room)
    cache_of = FixedCache if compiled else KVCache
    cache = cache_of(model.config, length, device=weight.device, dtype=weight.dtype)
    of_one_token = compiled_next_logits(weight.device) if compiled else next_logits
    [tokens], start = to_device([np.array([prompt])], weight.device), 0
    while True:
        positions = torch.arange(start, start + tokens.shape[1], device=weight.device)
        cache.begin(positions, start)
        with gpu_of(weight.device):
            compute = of_one_token if start else next_logits
            logits = compute(model, tokens, positions, cache).cpu()
        if first is not None:
            allowed = torch.full_like(logits, float("-inf"))
            allowed[first] = 0
            logits, first = logits + allowed, None
        token = draw.choose(softmax_at(logits, temperature)) if temperature else int(logits.argmax())
        if token in stops:
            return
        yield token
        start += tokens.shape[1]
        if start + 1 >= length:
            return
        [tokens] = to_device([np.array([[token]])], weight.device)


def heal(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[int], list[int] | None]:
    """(ids without a last token of spaces, the ids the next token may be), so that "def " can go on as " def| name".

    A tokenizer joins a space to the word that follows, so a prompt that ends in one has cut a token in two. Its last
    token is taken back, and the first new token must begin with the same characters.
    """
    tail = tokenizer.decode_bytes(ids[-1:])
    if len(ids) < 2 or not tail or tail.strip(b" "):
        return ids, None
    specials = set(tokenizer.specials.values())
    candidates = (i for i in range(tokenizer.vocab_size) if i not in specials)
    return ids[:-1], [i for i in candidates if tokenizer.decode_bytes([i]).startswith(tail)]


def folder_of(model: str, option: str = "--model") -> Path:
    """The folder of a committed checkpoint, by name, or of a path. Raises ValueError, with the command that makes the
    folder, if it is missing."""
    folder = CHECKPOINTS / model if model in COMMITTED else Path(model)
    if (folder / "config.json").is_file():
        return folder
    if model in COMMITTED:
        raise ValueError(
            f"there is no {model} checkpoint yet: make it with "
            f"`python -m minillm train --model-size {model} --export {folder}`, or name a folder with {option}"
        )
    for run in (folder, RUNS / model):
        if (run / RUN_FILE).is_file():
            where = "" if run.parent == RUNS else f" --runs {shlex.quote(str(run.parent))}"
            raise ValueError(
                f"{option} {model} is a training run: `python -m minillm train --resume --run {shlex.quote(run.name)}"
                f"{where} --export FOLDER` makes the steps that it still lacks and writes a model folder"
            )
    raise ValueError(
        f"{option} {model} is not a model folder (no config.json in it): name one, or {' or '.join(COMMITTED)}"
    )


def device_of(name: str) -> torch.device:
    """The device of that name; ValueError if this torch cannot compute on it here. Takes no memory on a GPU."""
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.zeros(1, device=device).item()
        elif (device.index or 0) >= (count := torch.cuda.device_count()):
            raise RuntimeError(f"CUDA GPUs found: {count}")
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        why = "torch knows no such device" if why.startswith("Expected one of") else why  # it lists all twenty
        raise ValueError(f"--device {name} cannot be used ({why}): try cpu") from error
    return device
