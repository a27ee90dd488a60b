"""All that pipeline schedules are used by, under one name: `from minillm.parallel import schedules`.

Which orders there are, `SCHEDULES` by name: `orders.py`.
"""

from minillm.parallel.pipeline_parallel.schedule.actions import (
    Action,
    Edge,
    Place,
    Schedule,
    ScheduleError,
    Task,
)
from minillm.parallel.pipeline_parallel.schedule.check import Report, check, violations
from minillm.parallel.pipeline_parallel.schedule.memory import (
    WeightVersions,
    peak_bytes,
    peak_in_flight,
    weight_versions,
)
from minillm.parallel.pipeline_parallel.schedule.messages import batches, messages_as_used, with_messages
from minillm.parallel.pipeline_parallel.schedule.orders import (
    SCHEDULES,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zero_bubble,
    zero_bubble_v,
)
from minillm.parallel.pipeline_parallel.schedule.simulate import (
    Bar,
    Durations,
    Timeline,
    observed,
    parse_chart,
    simulate,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Bar",
    "Durations",
    "Edge",
    "Place",
    "Report",
    "Schedule",
    "ScheduleError",
    "Task",
    "Timeline",
    "WeightVersions",
    "batches",
    "check",
    "dualpipe",
    "gpipe",
    "interleaved",
    "messages_as_used",
    "observed",
    "one_f_one_b",
    "parse_chart",
    "peak_bytes",
    "peak_in_flight",
    "pipedream",
    "simulate",
    "violations",
    "weight_versions",
    "with_messages",
    "zero_bubble",
    "zero_bubble_v",
]
