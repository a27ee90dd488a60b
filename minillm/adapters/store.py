"""Adapters by name, of which the hot ones are on the device, within a byte budget.

    folders of peft's ──register──▶ a name ──registered: read once──▶ its bytes and its digest
                                                   │ hold
        on disk  ──────── read again ──────▶ resident, in use ──▶ resident, idle ──▶ evicted
                                                   ▲                    │ the least recently used first,
                                                   └──── used again ────┘ when another one needs the room

    store = AdapterStore(model, {"french": "adapters/french"}, budget_bytes=1 << 30, max_adapters=16)
    number = store.registered("french").number
    store.hold({number})                                   # resident until the next `hold` without it
    with store.routed(adapters=[number, NO_ADAPTER], counts=[5, 1]):
        model(tokens)                                      # 5 rows with the adapter, then 1 of the base

Every `hold` says anew what is in use, so no pin is left behind, whatever became of a request. An adapter is whole or
not there: a file is read into memory at once, checked, and compared with what was read first, since keys and values in
the prefix cache depend on it. A folder that is damaged, or made for another base, is refused in one sentence; what is
resident stays. `LLM(model, adapters=store)` serves it (S-LoRA, Sheng et al. 2023, §5).
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from minillm.adapters.attach import adapters as attached_adapters
from minillm.adapters.cut import Cut, Pair
from minillm.adapters.grouped import Matrices, segments_of
from minillm.adapters.peft_folder import CONFIG, TENSORS, Adapter, check_fits, read_peft, sizes_of_layers
from minillm.adapters.routed import OfLayer, routes_of
from minillm.adapters.start import BaseFolder
from minillm.model import Transformer
from minillm.model.hf.load import open_folder
from minillm.model.parts import weight_of

BUDGET_BYTES, MAX_ADAPTERS = 1 << 30, 16


@dataclass(frozen=True)
class Registered:
    """An adapter that was read once. number: what a pass calls it. nbytes: on the device. digest: of its values."""

    name: str
    number: int
    rank: int
    nbytes: int
    digest: str

    @property
    def cache_key(self) -> str:
        """Its prefixes begin with it. Two names of equal values share none: one may fail to load in the step that
        would have computed them for the other."""
        return f"{self.number}:{self.digest}"


class AdapterStore:
    """Of one model, for one engine at a time.

    folders: name -> a folder of peft's; nothing is read before an adapter is asked for. budget_bytes: of all that are
    resident, in the model's dtype. max_adapters: different ones in one pass. fingerprint: of the model's folder, to be
    compared with what an adapter says of its base (`fingerprint_of`); "" = not compared. cut: of a model that is this
    rank's part of one.
    in_use, loads, evictions: what `hold` was told last; how often one was read to the device, and thrown out.
    ValueError, in one sentence, for all that a user can get wrong.
    """

    def __init__(
        self,
        model: Transformer,
        folders: Mapping[str, str | Path],
        *,
        budget_bytes: int = BUDGET_BYTES,
        max_adapters: int = MAX_ADAPTERS,
        fingerprint: str = "",
        cut: Cut | None = None,
    ):
        for option, value in (("budget_bytes", budget_bytes), ("max_adapters", max_adapters)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{option} {value!r} must be a whole number of at least 1.")
        if attached_adapters(model):
            raise ValueError("this model has an adapter attached: detach it, or merge it, before others are served.")
        self.model, self.budget_bytes, self.max_adapters = model, budget_bytes, max_adapters
        self.fingerprint, self.cut = fingerprint, cut
        self._layers = sizes_of_layers(model) if cut is None else cut.sizes()
        self.in_use: frozenset[int] = frozenset()
        self.loads = self.evictions = 0
        self._folders: list[Path] = []  # by number
        self._numbers: dict[str, int] = {}
        self._registered: dict[int, Registered] = {}
        self._resident: OrderedDict[int, dict[str, Matrices]] = OrderedDict()  # the least recently used first
        for name, folder in folders.items():
            self.register(name, folder)

    @classmethod
    def beside(
        cls, base: str | Path, model: Transformer, folders: Mapping[str, str | Path], **options: Any
    ) -> "AdapterStore":
        """Of a model that was loaded from the folder `base`; all adapters are read now, so that a bad one is told
        before anything else begins. options: of the store."""
        store = cls(model, folders, fingerprint=fingerprint_of(base), **options)
        for name in folders:
            store.registered(name)
        return store

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    @property
    def resident(self) -> list[str]:
        """Names, the least recently used first."""
        names = self.names
        return [names[number] for number in self._resident]

    @property
    def nbytes(self) -> int:
        """Of all that are resident."""
        return sum(self._registered[number].nbytes for number in self._resident)

    def register(self, name: str, folder: str | Path) -> None:
        """Gives a folder a name, for good. A new version of an adapter is another adapter, with a name of its own."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of an adapter {name!r} must be a text that is not empty.")
        if name in self._numbers:
            raise ValueError(f"adapter {name!r} is registered already, for {self._folders[self._numbers[name]]}.")
        self._folders.append(Path(folder))
        self._numbers[name] = len(self._folders) - 1

    def registered(self, name: str) -> Registered:
        """An adapter that can be served: its folder is whole, fits the model and the budget."""
        if not isinstance(name, str) or name not in self._numbers:
            close = get_close_matches(str(name), self._numbers, 1) or list(self._numbers)[:5]
            known = f"there is {', '.join(close)}" if close else "there are none"
            raise ValueError(f"no adapter {name!r} here: {known}.")
        number = self._numbers[name]
        if number not in self._registered:
            adapter = self._read(number)
            size = weight_of(self.model).element_size()
            nbytes = size * sum(a.numel() + b.numel() for a, b in self._parts(adapter).values())
            if nbytes > self.budget_bytes:
                raise ValueError(f"adapter {name!r} has {nbytes:,} bytes: raise budget_bytes {self.budget_bytes:,}.")
            self._registered[number] = Registered(name, number, adapter.config.rank, nbytes, digest_of(adapter))
        return self._registered[number]

    def has_room(self, numbers: Collection[int]) -> bool:
        """Whether all of these, which are registered, can be in use at once."""
        nbytes = sum(self._registered[number].nbytes for number in numbers)
        return len(numbers) <= self.max_adapters and nbytes <= self.budget_bytes

    def hold(self, numbers: Collection[int]) -> dict[int, str]:
        """These are in use from here on, and resident; the others may be evicted. Needs `has_room` for them.

        Returns why some could not be loaded: those are neither.
        """
        if not self.has_room(numbers):
            raise RuntimeError(f"{len(numbers)} adapters are too many for the store: ask `has_room` first.")
        self.in_use, failed = frozenset(numbers), {}
        for number in sorted(self.in_use - self._resident.keys()):
            try:
                self._load(number)
            except Exception as failure:  # whatever a file system may do: others go on
                failed[number] = str(failure) if isinstance(failure, ValueError) else repr(failure)
        self.in_use -= failed.keys()
        return failed

    @contextmanager
    def routed(self, adapters: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Inside, a pass of this thread takes counts[i] rows, one sequence after the other, through adapters[i], which
        is in use, or `NO_ADAPTER`."""
        segments = segments_of(adapters, counts)
        wanted: dict[int, OfLayer] = {number: self._resident[number] for number, _, _ in segments}
        for number in wanted:
            self._resident.move_to_end(number)
        with routes_of(self.model).taken(segments, wanted):
            yield

    def _parts(self, adapter: Adapter) -> dict[str, Pair]:
        return adapter.matrices if self.cut is None else self.cut.parts(adapter.matrices)

    def _load(self, number: int) -> None:
        known, adapter = self._registered[number], self._read(number)
        if digest_of(adapter) != known.digest:
            raise ValueError(f"{self._folders[number]} has changed since it was read: register it under another name.")
        while self.nbytes + known.nbytes > self.budget_bytes:
            idle = next(each for each in self._resident if each not in self.in_use)
            del self._resident[idle]
            self.evictions += 1
        weight, scale = weight_of(self.model), adapter.config.scale
        here = {"device": weight.device, "dtype": weight.dtype, "copy": True}
        mine = ((name, pair) for name, pair in self._parts(adapter).items() if self.cut is None or self.cut.has(name))
        self._resident[number] = {name: Matrices(a.to(**here), b.to(**here), scale) for name, (a, b) in mine}
        self.loads += 1

    def _read(self, number: int) -> Adapter:
        """All of it, as it is on disk; ValueError if it is damaged, does not fit, or is written meanwhile."""
        folder = self._folders[number]
        before = _state_of(folder)
        adapter = read_peft(folder)
        if _state_of(folder) != before:
            raise ValueError(f"{folder} is being written: ask again once it is whole.")
        check_fits(adapter, self._layers, folder, self.fingerprint)
        return adapter


def fingerprint_of(folder: str | Path) -> str:
    """Of a base's folder; "" for a quantized one, since adapters beside it may be trained on what it was made of."""
    return "" if open_folder(Path(folder)).quantized else BaseFolder(folder).fingerprint


def digest_of(adapter: Adapter) -> str:
    """The same for the same updates, in every process."""
    digest = blake2b(repr(adapter.config.scale).encode(), digest_size=16)
    for name, pair in sorted(adapter.matrices.items()):
        for matrix in pair:
            digest.update(f"{name} {list(matrix.shape)} {matrix.dtype}".encode())
            digest.update(matrix.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _state_of(folder: Path) -> list[tuple[int, int, int] | None]:
    """What changes whenever one of its files does."""
    found = []
    for path in (folder / CONFIG, folder / TENSORS):
        try:
            state = path.stat()
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
        except OSError:
            found.append(None)
    return found
