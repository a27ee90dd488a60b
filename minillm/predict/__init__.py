"""What should happen: closed forms for bytes, rounds, time and memory. No torch needed.

comms.py     collectives            roofline.py   what a device reaches        model.py   what a transformer costs
faults.py    failures of large jobs, and how often to save              kernels.py    bytes, launches, fusing
training/    a step, axis by axis    serving/      queues, draft tokens, bits  planner/   which layout to run
"""

from minillm.predict import comms, roofline

__all__ = ["comms", "roofline"]
