"""A start's phases add up to what an observer outside the process sees."""

import subprocess
import sys
import time

PROGRAM = """
import time; time.sleep(0.3)
import minillm
from minillm.measure.start import Start
start = Start(); start.end("imports"); time.sleep(0.2); start.end("load")
print(*start.phases.values())
"""


def test_phases_add_up_to_the_age_of_the_process():
    began = time.monotonic()
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    seconds = time.monotonic() - began
    process, imports, load = map(float, found.split())
    assert process >= 0.3 and load >= 0.2 and imports >= 0
    assert process + imports + load <= seconds + 0.05
