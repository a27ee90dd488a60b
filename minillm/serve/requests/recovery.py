"""After a step that ended amid its bookkeeping, as by Ctrl-C: whatever it has left, blocks and queue start anew."""

from minillm.serve.requests.request import Sample
from minillm.serve.requests.table import RequestTable
from minillm.serve.schedule.sequence import Held, State


def start_anew(table: RequestTable, error: str) -> None:
    """Requests that had begun have failed; those that had not are queued again. It can itself be interrupted, and is
    then done again."""
    table.scheduler.reset()
    if table.speculation is not None:
        table.speculation.reset(sample for request in table.live.values() for sample in request.samples)
    table.deadlines.clear()
    queued = {}
    for name, request in list(table.live.items()):
        if request.ended is None and request.scheduled is None:
            for sample in request.samples:
                _forget_queue(sample)
            queued[name] = request
            continue
        if request.ended is None:  # else it was interrupted in `close`
            request.error = error
            for sample in request.samples:
                if sample.reason is None:
                    sample.close("failed")
        table.close(request)
    with table.submitting:
        table.arrived = queued | table.arrived
    table.live.clear()


def _forget_queue(sample: Sample) -> None:
    """As it was before it was queued; whatever it held is free again."""
    sample.state, sample.num_computed, sample.hit_tokens, sample.first_block = State.NEW, 0, 0, 0
    sample.ticket = sample.received_tokens = 0
    sample.blocks, sample.host_blocks, sample.windowed = [], [], Held()
