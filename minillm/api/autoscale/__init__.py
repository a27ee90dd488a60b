"""How many replicas there should be: the same decisions drive processes and a simulated day.

    policies.py    replicas that a history asks for: reactive (Kubernetes' formula) and predictive
    controller.py  a policy within limits and with a cool-down; the loop that observes, decides and resizes a fleet
    simulated.py   a fleet whose requests, queue and cold starts are events: a day in seconds
    processes.py   a fleet of `python -m minillm serve` processes behind a router; where the time of a start went

A fleet is anything with `observe() -> Sample`, `resize(count)` and `sleep(seconds)`. A new replica takes a *cold start*
(process, imports, weights, warm-up) until it serves; meanwhile the queue grows by (arrivals - services) per second. A
*warm pool* holds replicas that are ready and get no requests: taking one of them takes no time, and costs them all day.
"""
