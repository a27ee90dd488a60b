"""The memory tracker: which bytes are alive, what they are for, and what the peak was made of.

    with memory(model, optimizer) as tracker:
        loss(model(x)).backward()
        optimizer.step()
    tracker.live        # now, by kind: parameter, buffer, gradient, optimizer, activation, other
    tracker.at_peak     # what lay there at the fullest moment
    tracker.peak        # the most each kind ever held; .total is the fullest moment

It counts the *storages* of dense tensors, so a view or a tied weight costs nothing twice (one mapped from a file lies
on the disk: it costs nothing at all), and it watches every operation through PyTorch's dispatcher, so CPU and CUDA are
counted alike, to the byte that was asked for (an allocator rounds up). What an operation allocates and frees inside
itself is not seen. Tensors made before the `with` count from their first use.

A storage is named after the most telling thing it ever was: a gradient while it is still being computed counts as
`gradient` in `at_peak` and `live`. `activation` is what autograd saved for the backward pass and is nothing above it in
the list; inside a recomputation, everything that is recomputed. The hooks that tell it switch off PyTorch's check for
saved *outputs* that were changed in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from minillm.measure.watch import Watch

KINDS = ("parameter", "buffer", "gradient", "optimizer", "activation", "other")  # the most telling first


def memory(
    module: torch.nn.Module | None = None, optimizer: object = None, device: torch.device | str | None = None
) -> MemoryTracker:
    """A tracker of the tensors of a training step; enter it with `with` to follow activations and the peak.

    module: whose parameters, buffers and gradients are meant; without it, every `nn.Parameter` used is a parameter.
    optimizer: whatever tensors it holds that are not the module's count as `optimizer` (moments, master weights). One
    that keeps gradients elsewhere than in a .grad (ZeRO, on their way to its shard) lists them in `.gradients`.
    device: count only this device ("cuda" means all of them); by default all but "meta".
    Without `with`, `.live` still tells what module and optimizer hold now.
    """
    if module is not None and not isinstance(module, torch.nn.Module):
        raise ValueError(f"module is a {type(module).__name__}; give an nn.Module (several fit in an nn.ModuleList)")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; give an optimizer with .param_groups")
    return MemoryTracker(module, optimizer, None if device is None else torch.device(device))


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind. `total` is their sum, except in `MemoryTracker.peak`, whose kinds peak at different moments."""

    parameter: int = 0
    buffer: int = 0
    gradient: int = 0
    optimizer: int = 0
    activation: int = 0
    other: int = 0
    total: int = 0

    def __getitem__(self, kind: str) -> int:
        if kind not in self.keys():
            raise KeyError(f"no kind {kind!r}; kinds are {', '.join(self.keys())}")
        return getattr(self, kind)

    def keys(self) -> tuple[str, ...]:
        return KINDS

    def items(self) -> Iterator[tuple[str, int]]:
        return ((kind, self[kind]) for kind in KINDS)

    def __str__(self) -> str:
        return "\n".join(f"{f.name:<10} {getattr(self, f.name) / 2**20:>10.3f} MiB" for f in fields(self))


@dataclass
class _Entry:
    """One storage: a weak reference, so that the tracker keeps nothing alive, and its rank in KINDS."""

    storage: weakref.ref
    kind: int


class MemoryTracker(Watch):
    """See `memory`."""

    def __init__(self, module: torch.nn.Module | None, optimizer: object, device: torch.device | None) -> None:
        super().__init__()
        self._module, self._optimizer, self._device = module, optimizer, device
        self._entries: dict[int, _Entry] = {}
        self._at_peak: list[tuple[_Entry, int]] = []
        self._peak, self._peak_total = [0] * len(KINDS), 0
        self._hooks: list = []
        self._scan()

    @property
    def live(self) -> Bytes:
        """Bytes alive now."""
        self._scan()
        return _by_kind(self._sizes())

    @property
    def at_peak(self) -> Bytes:
        """What the fullest moment was made of."""
        self._scan()
        return _by_kind(self._at_peak)

    @property
    def peak(self) -> Bytes:
        """The most each kind held at any moment, and in `total` the most that all held together."""
        self._scan()
        return Bytes(*self._peak, total=self._peak_total)

    def __enter__(self) -> MemoryTracker:
        self._scan()
        for parameter, _ in self._parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
                # To the head of the line: the others may well shard the gradient and free it (ZeRO).
                hooks = parameter._post_accumulate_grad_hooks
                hooks.update({key: hooks.pop(key) for key in tuple(hooks) if key != handle.id})
                self._hooks.append(handle)
        if hasattr(self._optimizer, "register_step_post_hook"):
            self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._scan()))
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._saved.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._saved.__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()
        self._scan()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        recomputing = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        seen = [self._mark(tensor, "activation" if recomputing else "other") for tensor in _tensors(result)]
        for tensor in _tensors((args, kwargs)):
            is_parameter = self._module is None and isinstance(tensor, torch.nn.Parameter)
            seen.append(self._mark(tensor, "parameter" if is_parameter else "other"))
        if any(seen):
            self._observe()
        return result

    # What each kind is known by.

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if self._mark(tensor, "activation"):
            self._observe()
        return tensor, tensor._version

    def _gradient_is_ready(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, "gradient")
        self._mark_held_gradients()
        self._observe()

    def _mark_held_gradients(self) -> None:
        for gradient in getattr(self._optimizer, "gradients", ()):
            self._mark(gradient, "gradient")

    def _scan(self) -> None:
        """Finds parameters, buffers, gradients and optimizer state where they are kept."""
        for parameter, kind in self._parameters():
            self._mark(parameter, kind)
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradient")
        for buffer in self._module.buffers() if self._module is not None else ():
            self._mark(buffer, "buffer")
        self._mark_held_gradients()
        if self._optimizer is not None:
            for tensor in _tensors(vars(self._optimizer)):
                self._mark(tensor, "optimizer")
        self._observe()

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        if self._module is not None:
            yield from ((parameter, "parameter") for parameter in self._module.parameters())
        # An optimizer's own copies of the weights are its state, unless they are all the weights we know of.
        kind = "parameter" if self._module is None else "optimizer"
        for group in getattr(self._optimizer, "param_groups", ()):
            yield from ((parameter, kind) for parameter in group["params"])

    # The book of storages.

    def _mark(self, tensor: torch.Tensor, kind: str) -> bool:
        """Enters the tensor's storages under `kind`; True if a storage is new or now has a more telling kind."""
        rank, changed = KINDS.index(kind), False
        for storage in _storages(tensor):
            if storage.device.type == "meta" or not self._wanted(storage.device):
                continue
            entry = self._entries.get(storage._cdata)
            if entry is None and storage.filename is not None:
                continue
            if entry is None:
                forget = _Forget(self._entries, storage._cdata)
                self._entries[storage._cdata] = _Entry(weakref.ref(storage, forget), rank)
                changed = True
            elif rank < entry.kind:
                entry.kind = rank
                changed = True
        return changed

    def _wanted(self, device: torch.device) -> bool:
        wanted = self._device
        return wanted is None or (device.type == wanted.type and wanted.index in (None, device.index))

    def _sizes(self) -> list[tuple[_Entry, int]]:
        """Every live storage with its size now (a storage can be resized without any operation being dispatched)."""
        found = ((entry, entry.storage()) for entry in tuple(self._entries.values()))
        return [(entry, storage.nbytes()) for entry, storage in found if storage is not None]

    def _observe(self) -> None:
        sizes = self._sizes()
        now = _by_kind(sizes)
        self._peak = [max(before, now[kind]) for before, kind in zip(self._peak, KINDS, strict=True)]
        if now.total > self._peak_total:
            self._peak_total, self._at_peak = now.total, sizes


class _Forget:
    """Strikes a freed storage out of the book. A plain object: a closure over the tracker would keep it alive."""

    def __init__(self, entries: dict[int, _Entry], key: int) -> None:
        self._entries, self._key = entries, key

    def __call__(self, storage: weakref.ref) -> None:
        entry = self._entries.get(self._key)
        if entry is not None and entry.storage is storage:
            del self._entries[self._key]


def _by_kind(sizes: Iterable[tuple[_Entry, int]]) -> Bytes:
    counts = [0] * len(KINDS)
    for entry, size in sizes:
        counts[entry.kind] += size
    return Bytes(*counts, total=sum(counts))


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The saved tensor, with the check PyTorch itself leaves out when hooks are in place."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} needed for the gradient was modified by an inplace operation "
            f"(saved at version {version}, now {tensor._version}); use the out-of-place operation"
        )
    return tensor


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor; a wrapper such as DTensor has none of its own, but wraps tensors that have."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # DTensor also names its mesh
                yield from _storages(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _tensors(held: object, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings, sequences and optimizers."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (Mapping, list, tuple)) or hasattr(held, "param_groups"):
        seen = set() if seen is None else seen
        if id(held) not in seen:
            seen.add(id(held))
            if not isinstance(held, (Mapping, list, tuple)):
                held = vars(held)
            for part in held.values() if isinstance(held, Mapping) else held:
                yield from _tensors(part, seen)
