"""Load on a server: requests sent when they are due, whatever the server does. `python -m minillm load URL`.

    plan.py       which requests come when: rates, bursts, a trace; lengths, prefix groups, tenants
    send.py       one request over HTTP, and what became of it: a Call
    drive.py      open loop: each at its time. closed loop: each user waits for an answer first (what hides stalls)
    report.py     percentiles, goodput under limits, errors by kind; the figure of latency against rate

A latency counts from the time at which its request was *due*. A generator that waits for a stalled server, or counts
from when it came to send, leaves out just the requests that a stall would have hit: *coordinated omission* (Tene 2013,
"How not to measure latency"). Nothing here depends on minillm's server; any that speaks OpenAI's API will do.
"""
