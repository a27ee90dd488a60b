"""docs/group.md, the page about `Group` that labs link to: written from the docstrings, so that it cannot drift."""

import inspect

from minillm.comm import Group

SHOWN = (
    ("Collectives", ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")),
    ("Point-to-point messages", ("send", "recv", "exchange")),
    ("Groups and small objects", ("subgroup", "gather_objects")),
)
HEAD = """# `Group`: what the labs communicate with

A rank program gets a `Group`: `launch(program, nproc=4)` calls `program(group)` on four ranks. This page is generated
from the docstrings in `minillm/comm/group.py` (`python -m minillm notebooks` writes it).

`group.rank` is this rank's place in the group (-1 if it is no member), `group.world_size` the number of its ranks,
`group.ranks` their global ranks, `group.device` where tensors must live. Ranks in calls (`root`, `src`, `dst`) are
places in the group. All ranks of the group must call its collectives in the same order.

`launch` stays on the CPU, also on a machine with GPUs, unless you say otherwise: `device=None` takes a GPU for each
rank where there are enough, `device="cuda"` takes GPUs even if ranks have to share them. The program then has to make
its tensors on `group.device`, as the scripts in `labs/torchrun/` do.

- In place, and returned: `all_reduce`, `broadcast`. A new tensor: `all_gather`, `reduce_scatter`, `all_to_all`.
- `all_gather` of `[n, ...]` returns one tensor `[world_size * n, ...]`, no list; `.chunk(group.world_size)` cuts it.
- `async_op=True` returns a `Work` at once; its `wait()` returns what the call would have returned. Leave the tensors
  alone until then.
- `send` returns when the other side has received, so two ranks that both send first wait for each other for ever.
  `exchange` posts both sides at once.
- No call reads or clears gradients. They add up in `p.grad` until the training loop calls `zero_grad()`: in an exercise
  that is the caller's task, unless its text says otherwise.
"""


def group_page() -> str:
    """The page as markdown."""
    parts = [HEAD]
    for title, names in SHOWN:
        parts.append(f"## {title}\n")
        for name in names:
            method = getattr(Group, name)
            parts.append(f"### `group.{name}{_signature(method)}`\n\n{inspect.getdoc(method)}\n")
    return "\n".join(parts)


def _signature(method) -> str:
    """The call as a reader types it: names and defaults, without self and without types."""
    signature = inspect.signature(method)
    shown = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))
