"""Where a shard's weights and optimizer state live when the accelerator is too small for them.

    None       on the device itself: nothing moves
    "cpu"      host memory, pinned where there is a GPU, so copies run at full speed  (ZeRO-Offload, Ren et al. 2021)
    a Path     files in that folder, mapped into memory, on a local NVMe disk  (ZeRO-Infinity, Rajbhandari et al. 2021)

    device   gradient shard ──down──>  host: optimizer steps its own copy of the shard  ──up──> weights   device

The optimizer runs where its state is, so the state never moves: what crosses the host link in a step is the gradient
shard down and the updated weights up, 2 + 2 bytes per parameter in 16 bits. A mapped file is memory that the system may
write back and drop at any time, so it can be larger than the machine's memory.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor


class Offload:
    """A home for tensors. device: where code that works on them runs; down_bytes, up_bytes: what crossed the link.

    where: None, "cpu" or the Path of a folder. Files in it have no name: however this process ends, they end with it.
    device: the accelerator's. ValueError if `where` is something else or the folder cannot be written.
    """

    def __init__(self, where: str | Path | None, device: torch.device | str) -> None:
        if where is not None and where != "cpu" and not isinstance(where, Path):
            raise ValueError(f"offload={where!r} must be None, 'cpu' or the pathlib.Path of a folder on a local disk.")
        self.active, self.folder = where is not None, where if isinstance(where, Path) else None
        self.device = torch.device("cpu" if self.active else device)
        self.pinned = where == "cpu" and torch.device(device).type == "cuda"
        self.down_bytes = self.up_bytes = 0
        self._files: dict[str, Tensor] = {}
        if self.folder:
            self._mapped(torch.empty(1), torch.uint8)  # can it be written?

    def place(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of `tensor` (as `dtype`) that lives here. A file of that name is written again if the size fits."""
        dtype = dtype or tensor.dtype
        if self.folder is None:
            return self._empty(tensor, dtype).copy_(tensor.detach())
        kept = self._files.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, dtype):
            kept = self._files[name] = self._mapped(tensor, dtype)
        return kept.copy_(tensor.detach())

    def down(self, tensor: Tensor) -> Tensor:
        """`tensor`, which lies on the device, here; the same tensor if nothing is offloaded."""
        if not self.active:
            return tensor
        self.down_bytes += tensor.nbytes
        return self._empty(tensor, tensor.dtype).copy_(tensor)

    def up(self, tensor: Tensor, out: Tensor) -> None:
        """Copies `tensor`, which lives here, into `out` on the device. It travels in out's dtype."""
        if not self.active:
            out.copy_(tensor)
            return
        self.up_bytes += out.nbytes
        out.copy_(tensor if tensor.dtype == out.dtype else self._empty(tensor, out.dtype).copy_(tensor))

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves state that the optimizer has made since the last call into files (in host memory it is already)."""
        if self.folder is None:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.untyped_storage().filename is None:
                    state[key] = self.place(f"{index}.{key}", value)

    @property
    def file_bytes(self) -> int:
        """Bytes in this object's files."""
        return sum(kept.nbytes for kept in self._files.values())

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(like.shape, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def _mapped(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty file of the tensor's size, mapped. Its disk space is reserved now: later, a full disk kills us."""
        size = like.numel() * dtype.itemsize
        if not size:
            return torch.empty(like.shape, dtype=dtype)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix="minillm-offload-", dir=self.folder) as file:
                reserve = getattr(os, "posix_fallocate", lambda descriptor, _, size: os.truncate(descriptor, size))
                reserve(file.fileno(), 0, size)
                return torch.from_file(file.name, shared=True, size=like.numel(), dtype=dtype).view(like.shape)
        except OSError as error:
            raise ValueError(
                f"offload={str(self.folder)!r} cannot take {size:,} bytes ({error.strerror}): "
                "name a folder on a local disk that you may write and that has space."
            ) from error
