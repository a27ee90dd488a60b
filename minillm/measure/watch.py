"""A way to see every operation that torch runs, for those who count."""

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """A dispatch mode that leaves torch's compiler alone: by default the first operation would load it, for seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
