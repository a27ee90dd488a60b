"""One address in front of several servers: `python -m minillm route --replicas URL,URL` or `--spawn N`.

    client ──▶ app.py ──▶ forward.py ── fleet.py: which replica? ──▶ a replica, `python -m minillm serve` or any other
           ◀── chunks, unchanged ──┘        policies.py, health.py, budget.py

Reading order:
1. `policies.py`  pure rules that take loads and return an index: round robin, least outstanding, power of two choices,
                  prefix affinity by consistent hashing with a bounded load
2. `health.py`    when a replica is ejected, and when it returns
3. `budget.py`    how many retries there may be
4. `fleet.py`     the replicas, their open requests, their checks; drained before they leave
5. `forward.py`   a request on its way: retried before its first token, cancelled with its client; later losses are told
6. `app.py`       routes, keys and limits (those of the server), and `/replicas` for an operator
7. `processes.py` replicas that are processes of this machine; they end with the router
   `spawned.py`   how many of them there are: resized, replaced when they die, restarted one by one
   `metrics.py`   what Prometheus sees of it

For programs:
- `policy.choose(loads, key) -> index`: `Load(name, outstanding)` of each replica that may be chosen, `key` the bytes
  that requests with a common prefix share. A policy knows no clock and no network, so that a simulation drives it.
- `RetryBudget(share, reserve)`: `deposit()` for each request, `withdraw() -> bool` for each retry on a replica's "no".
- `Fleet.add(url)`, `await Fleet.drain(url, timeout_s)`, `Fleet.remove(url)`, `Fleet.replicas`.
- `await Spawned.resize(n)`, `await Spawned.restart()`, `Spawned.wanted`.
Over HTTP, from this machine or with `--admin-key`:
- `GET /replicas`: a list of {url, state, outstanding}; a state is "starting", "ready", "ejected" or "draining"
- `POST /replicas {"url": ...}` adds one, which gets requests once its `/ready` answers 200
- `DELETE /replicas?url=...&wait_s=30` drains one and removes it
- `POST /replicas/count {"count": n}` and `POST /replicas/restart` where replicas were spawned
- `/metrics`: `minillm_router_*`, see `metrics.py`; queue and times are each replica's own `/metrics`
"""
