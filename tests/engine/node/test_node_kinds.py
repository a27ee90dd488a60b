"""Which kinds of faults the node catches by name: for each kind the planted faults, which the tests of this folder hold
the node to.
"""

from tests.engine.node import planted, test_node, test_node_graphs

ORDER = "communicators in another order"  # test_node_faults.py, and test_node.py for the replay of all launches

KINDS: dict[str, tuple[str, ...]] = {
    "tensors of two devices": ("CPU and GPU", "two GPUs", "written on the CPU", "loss on the CPU", "numpy"),
    "a mask that a GPU cannot read where it lies": ("mask that begins anywhere",),
    "a generator of another device": ("generator of the CPU", "drawn on the GPU by the CPU"),
    ".item(), int(), float()": ("item", "value read in the loss"),
    ".tolist(), print": ("tolist", "print"),
    "bool, equal": ("bool", "equal"),
    "nonzero, a mask, a number of repetitions that only the device knows": ("nonzero", "mask", "repeat"),
    "a blocking copy to the host": ("cpu",),
    "a blocking copy to the device": ("to", "copy_", "index of the CPU", "blocking copy in the norm"),
    "a copy of pageable memory": ("pageable",),
    "torch.tensor(list, device=...)": ("list", "new_tensor"),
    "synchronize, of a device, a stream, an event": ("synchronize", "stream", "event", "norm synchronizes"),
    "a read on a stream that did not wait": (
        *("read on another stream", "side stream does not wait", "result not waited for"),
        *("bucket read before it is reduced", "gather not waited for", "message used before it is there"),
    ),
    "a write to what another stream reads": ("written while read", "gradient written while it is reduced"),
    "memory freed while a stream uses it": ("freed while used", "inputs of collectives not kept"),
    "memory kept behind its wait": (
        *("buffers kept for ever", "buffers kept from step to step", "activations in a cycle"),
    ),
    "a copy to the host read before it is there": ("read too early",),
    "pinned memory written under its copy": ("overwritten", "overwritten by numpy"),
    "a collective on tensors of the CPU": ("collective on the CPU", "bucket on the CPU"),
    "a collective that nobody waits for": ("wait forgotten",),
    "two communicators in different orders on different ranks": (ORDER,),
    "what a CUDA graph cannot capture": tuple(test_node_graphs.REFUSED),
    "a replay that reads what the step does not write": ("inputs that are not static", "a value read in the pass"),
}
# What no test saw before there was the node, of 18 planted faults.
SURVIVED = (
    *("blocking copy in the norm", "inputs of collectives not kept", "buffers kept for ever"),
    *("side stream does not wait", ORDER),
)


def test_every_planted_fault_is_of_a_kind() -> None:
    by_kind = [name for names in KINDS.values() for name in names]
    tables = (test_node.WRONG, planted.FAULTS, test_node_graphs.REFUSED, test_node_graphs.FAULTS, {ORDER: None})
    all_planted = [name for table in tables for name in table]
    assert sorted(by_kind) == sorted(all_planted) and set(SURVIVED) <= set(by_kind)
