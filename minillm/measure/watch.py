"""A dispatch mode that sees every operation that torch runs, for code that counts them."""

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """A dispatch mode that does not load torch's compiler, which torch's own would do at the first operation and which
    takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
