"""A CUDA graph without a GPU: records the tensor operations of a pass, and repeats these very operations on the very
same memory. Whatever the host decided in between, a length, a shape, a row, is repeated as it was; and nothing may be
read back while recording, which a GPU refuses, too."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

READS_BACK = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.name().split(".")[0] in READS_BACK:
            raise RuntimeError(f"{function} while a graph is recorded")
        results = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, results))
        return results

    def repeat(self):
        for function, args, kwargs, results in self.operations:
            given = {id(each) for each in tree_flatten((args, kwargs))[0]}
            memory = {each.untyped_storage().data_ptr() for each in tree_flatten((args, kwargs))[0] if is_tensor(each)}
            again = function(*args, **kwargs)
            for old, new in zip(tree_flatten(results)[0], tree_flatten(again)[0], strict=True):
                view = is_tensor(old) and old.untyped_storage().data_ptr() in memory
                if is_tensor(old) and id(old) not in given and not view:
                    old.copy_(new)


def is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def record(compute):
    """Instead of `DecodeGraphs._record`."""
    with Recorder() as recorder:
        logits = compute()

    def replay():
        recorder.repeat()
        return logits

    return replay
