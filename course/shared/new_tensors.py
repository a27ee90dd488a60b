"""What torch makes anew inside a block: how a check sees that an answer with right values stored too much."""

import weakref

from torch import Tensor

from minillm.measure.watch import Watch


class NewTensors(Watch):
    """What torch made anew inside the block, in numbers: the largest tensor, and the most alive at once (no views).

    known: tensors that were there before. Numbers are taken to be of 8 bytes, as those of the checks are.
    """

    def __init__(self, *known: Tensor):
        super().__init__()
        self.largest = self.most_alive = 0
        self._known = {x.untyped_storage().data_ptr() for x in known}
        self._alive: dict[int, int] = {}  # numbers by the storage's address

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, x.numel())
                self._keep(x.untyped_storage())
        return found

    def _keep(self, storage) -> None:
        address = storage.data_ptr()
        if address not in self._alive:
            self._alive[address] = storage.nbytes() // 8
            weakref.finalize(storage, self._alive.pop, address, None)
            self.most_alive = max(self.most_alive, sum(self._alive.values()))
