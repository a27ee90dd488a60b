# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 19 · A serving fleet
#
# **Queueing, not arithmetic, makes p99.** A replica that answers in 300 ms at night may take 3 s at noon, with the same
# weights, kernels and prompts. What grew is the time in which nothing is computed for the request.
# Stands on labs 12 (prefill and decode) and 14 (the scheduler).
#
# The core path, exercises 1, 3, 4, 6 and 7 with *Break it*, takes two hours; with the rest and the questions plan four.
# Running the notebook from top to bottom takes under a minute. At the end you can answer:
#
# 1. Where do a request's seconds go, and which part of them grows with the load?
# 2. When does another replica help, and when does it come too late?
# 3. How does a fleet of sound replicas break down, what do its metrics say, and what ends it?
#
# *Measured* is this machine. *Simulated* has a clock of its own: in `stage.py` the engine is minillm's (scheduler,
# blocks, preemption), and a pass takes 10 ms and 0.5 ms per token; in `queues.py` and for days and cold starts the
# replicas are events, too. *Formula* is arithmetic.
#
# > **Common claims**
# >
# > - *"The average latency is fine."* Users meet the tail: a page that makes 20 calls meets the p99 of one of them in
# >   18 % of its loads, $1 - 0.99^{20}$ ([Dean and Barroso 2013](https://research.google/pubs/the-tail-at-scale/)).
# > - *"At 80 % utilization a fifth of the capacity is left."* At 80 % the mean wait is already two service times if
# >   all are equal, and ten if their standard deviation is twice their mean.
# > - *"Retries make a service reliable."* They multiply the load when there is least room for it
# >   ([Bronson et al. 2021](https://sigops.org/s/conferences/hotos/2021/papers/hotos21-s11-bronson.pdf), metastable
# >   failures).
# > - *"An autoscaler handles bursts."* It handles what lasts longer than a cold start.

# %%
import bisect
import collections
import hashlib
import math

from course.kit import check, finish, hint, show, sliders
from course.lab19_serving_fleet import figures, receipts
from course.lab19_serving_fleet import receipts_measured as measured

# %% [markdown]
# ## Predict
#
# One replica answers one request at a time, each in exactly 1 s; requests come at random. **How long do they wait on
# average at 50 % load, and at 95 %?** And: two requests per second come where one can be served, and the second
# replica takes 60 s to start. **How many requests wait when it is ready?**

# %%
guess_wait_half = 0.5  # your guess: seconds, at 50 % load
guess_wait_full = 1.0  # your guess: seconds, at 95 % load
guess_backlog = 30  # your guess: requests

# %%
receipts.predictions(guess_wait_half, guess_wait_full, guess_backlog)

# %% [markdown]
# ## Where the seconds go
#
# A request waits in the queue, its prompt is computed (prefill), its answer is decoded. The engine notes all three.
# Eight sequences at once, 64 prompt and 16 answer tokens, at rising rates:

# %%
show(figures.latency_parts)

# %%
receipts.split()

# %% [markdown]
# Decoding gets slower, since each pass holds more sequences, and there it stops: the batch is full. The queue has no
# such limit. *Little's law*, $L = \lambda W$, holds for whatever is inside, and needs no assumption: requests inside =
# arrivals per second times seconds inside. A gauge of requests and a counter of arrivals tell you the mean latency.
#
# ### The knee
#
# For one server, random (Poisson) arrivals and any services, the mean wait is known
# ([Pollaczek 1930, Khinchine 1932](https://en.wikipedia.org/wiki/Pollaczek%E2%80%93Khinchine_formula)):
# $W = \frac{\rho}{1-\rho} \cdot \frac{1 + c^2}{2} \cdot S$, with load $\rho$, mean service $S$ and its spread $c$
# (standard deviation / mean). Two factors, and neither is about speed: how full, and how uneven.

# %%
show(figures.knee)

# %%
sliders(figures.knee, cv=(0.0, 3.0, 0.25), service_ms=(50, 2000, 50))

# %%
receipts.pollaczek_khinchine()

# %% [markdown]
# The same on this machine: the draft model behind minillm's HTTP server, one request at a time, loaded by
# `minillm.api.load` (`python -m minillm load`). *path* is the recursion of lab 21 for exactly the arrivals that were
# sent, with the measured services in random order; the formula speaks of the long run, from which sixty requests may
# be far. Both take services to be independent of the queue, and here they are not. A request that finds the server idle
# takes longer (*if idle before*), since its service includes the way over HTTP, which others have behind them when
# their turn comes. In random order such long services hold up a queue as well, which makes *path* longer. Whatever slows
# several services in a row, such as another program on this machine, makes the measured wait longer than both.

# %%
measured.measured_knee()

# %% [markdown]
# ## Build it
#
# ### Exercise 1 · the percentile of a stall (15 minutes)
#
# How you measure decides what you see. A load test sends ten requests per second; the server stands still for ten
# seconds. A generator that waits for each answer before it sends the next (*closed loop*) meets the stall once, and
# counts 1 of 600. But a hundred users would have met it. Leaving them out is *coordinated omission*
# ([Tene 2013](https://www.infoq.com/presentations/latency-response-time/)). The cure: requests are *due* at times
# that do not depend on the server, and latency counts from there. And a request that failed was not fast.


# %%
def latency_percentile(calls, share):
    """Seconds that `share` of the calls took at most: the smallest value that at least
    that share of all calls does not exceed (nearest rank). 0 < share <= 1.

    calls: each with .due, .sent and .ended, in seconds; .ended is None for a call that failed.
    Such a call took infinitely long."""
    # BEGIN SOLUTION
    seconds = sorted(math.inf if call.ended is None else call.ended - call.due for call in calls)
    return seconds[math.ceil(share * len(seconds)) - 1]
    # END SOLUTION


latency_percentile = check("latency-percentile", latency_percentile)

# %%
receipts.omission()

# %% [markdown]
# The two generators sent the same plan to the same server. By the closed one's p99 nothing happened.
#
# ### Exercise 2 · a token bucket (20 minutes, skip on a first reading)
#
# The first protection: each tenant may spend `rate` tokens per second on average, and save up to `burst`.


# %%
class TokenBucket:
    """Full at the start, at time 0."""

    def __init__(self, rate, burst):
        # BEGIN SOLUTION
        self.rate, self.burst = rate, burst
        self.tokens, self.at = burst, 0.0
        # END SOLUTION

    def take(self, now, cost):
        """-> 0.0, and the cost is taken; or the seconds after which it could be, and nothing is.
        now: never earlier than in the call before. cost: at most burst."""
        # BEGIN SOLUTION
        self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
        self.at = now
        if cost <= self.tokens:
            self.tokens -= cost
            return 0.0
        return (cost - self.tokens) / self.rate
        # END SOLUTION


TokenBucket = check("bucket-per-tenant", TokenBucket)

# %% [markdown]
# Rounded up to whole seconds, the number that `take` returns belongs in the `Retry-After` header of the 429. A bucket
# bounds what one tenant sends; it does not bound what all of them send. For that a queue needs an end. With q places, a
# request that takes the last of them waits about $q / \mu$ on average, and, for the eight places here, twice that at
# p99. The others hear *no* at once (lab 21): with $K = q + 1$ inside, a share $(1-\rho)\,\rho^K / (1-\rho^{K+1})$ of
# them.

# %%
receipts.admission()

# %% [markdown]
# ### Exercise 3 · the power of two choices (15 minutes)
#
# Ten replicas: which gets the next request? The best is the one with the fewest open requests, but a router that asks
# all ten for every request is slow, and one that asks them now and then is wrong: all routers send everything to
# whoever was idle a moment ago. Asking *two* at random gets most of the gain
# ([Mitzenmacher 2001](https://www.eecs.harvard.edu/~michaelm/postscripts/tpds2001.pdf)).


# %%
def two_choices(outstanding, rng):
    """-> the index of a replica. outstanding: open requests of each; reading one asks that replica,
    and at most two may be asked. rng: a random.Random."""
    # BEGIN SOLUTION
    if len(outstanding) == 1:
        return 0
    first, second = rng.sample(range(len(outstanding)), 2)
    return first if outstanding[first] <= outstanding[second] else second
    # END SOLUTION


two_choices = check("two-choices", two_choices)

# %%
show(figures.routing)

# %%
receipts.routing(two_choices)

# %% [markdown]
# With exact counts, *least outstanding* wins. With counts that are four seconds old it is worse than taking turns:
# for four seconds every request goes to the same few replicas.
#
# ### Exercise 4 · fair queueing (25 minutes)
#
# First come, first served is unfair to whoever sends little: in a queue that a neighbour has filled, it waits for the
# neighbour. The *virtual token counter* ([Sheng et al. 2024](https://arxiv.org/abs/2401.00588)) serves the tenant that
# has received least. One trap: a tenant that was away must not come back with a credit for all that time, or it
# starves the others until it has caught up.


# %%
class FairQueue:
    """Requests of tenants; each tenant has a counter of the tokens that it received, from 0."""

    def __init__(self):
        # BEGIN SOLUTION
        self.waiting = collections.defaultdict(collections.deque)
        self.counter = collections.defaultdict(float)
        self.last_left = None
        # END SOLUTION

    def push(self, tenant, request):
        """If nothing of this tenant waits, its counter is first raised: to the smallest counter of
        the tenants that wait, or, if nobody does, to that of the tenant whose queue became empty
        last. A counter is never lowered."""
        # BEGIN SOLUTION
        if not self.waiting[tenant]:
            others = [self.counter[each] for each, queue in self.waiting.items() if queue]
            if others:
                floor = min(others)
            else:
                floor = 0.0 if self.last_left is None else self.counter[self.last_left]
            self.counter[tenant] = max(self.counter[tenant], floor)
        self.waiting[tenant].append(request)
        # END SOLUTION

    def pop(self):
        """-> (tenant, its oldest request): the waiting tenant with the smallest counter,
        among equals the first by name; None if nobody waits."""
        # BEGIN SOLUTION
        names = [tenant for tenant, queue in self.waiting.items() if queue]
        if not names:
            return None
        tenant = min(names, key=lambda name: (self.counter[name], name))
        request = self.waiting[tenant].popleft()
        if not self.waiting[tenant]:
            self.last_left = tenant
        return tenant, request
        # END SOLUTION

    def charge(self, tenant, tokens):
        """The tenant received these tokens: its prompt at the start, its answer as it comes."""
        # BEGIN SOLUTION
        self.counter[tenant] += tokens
        # END SOLUTION


FairQueue = check("fair-queue", FairQueue)

# %% [markdown]
# A real engine with your queue before it (simulated clock). The quiet tenant sends 4 requests per second, the noisy one
# 40, and 33 can be served:

# %%
receipts.neighbours(FairQueue)

# %% [markdown]
# A queue in front cannot reach into the engine: all places may be taken when the quiet tenant comes, and the noisy one's
# prompts make each step long. The last rows are of minillm's `FairScheduler` inside it, with longer prompts. It takes
# places back, and prompts of a tenant that wants more than its part take no more of a step than keeps the places full.
# All that is left to wait for is the step in progress and the one that computes its own prompt. So the tail stays
# within 1.5 times of being alone *if* these two together do, and if the tenant's requests fit its part of the places.
#
# ### Exercise 5 · affinity against balance (25 minutes, skip on a first reading)
#
# A replica that has the prefix of a prompt in its cache (lab 13) saves its prefill. So requests that begin alike should
# go to the same replica, and yet no replica should drown when a prefix becomes popular. *Consistent hashing with
# bounded loads* ([Mirrokni et al. 2018](https://arxiv.org/abs/1608.01350)): each replica has many points on a ring; a
# request goes to the owner of the next point clockwise whose load is below the bound.


# %%
def place_of(text):
    """Where on the ring, 0 to 2**32 - 1, a text lies: the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


class Ring:
    def __init__(self, replicas, points=64):
        """replicas: names. Each has its points at place_of(f"{name} {number}"), from number 0."""
        # BEGIN SOLUTION
        self.replicas = list(replicas)
        labels = [(name, f"{name} {n}") for name in self.replicas for n in range(points)]
        self.points = sorted((place_of(label), name) for name, label in labels)
        # END SOLUTION

    def choose(self, key, outstanding, bound):
        """-> a name: the owner of the first point at or after place_of(key), round the ring, with
        fewer than ceil(bound * (1 + all outstanding) / replicas) open requests.
        outstanding: {name: open requests}; bound: 1 or more."""
        # BEGIN SOLUTION
        capacity = math.ceil(bound * (1 + sum(outstanding.values())) / len(self.replicas))
        start = bisect.bisect_left(self.points, (place_of(key), ""))
        for step in range(len(self.points)):
            name = self.points[(start + step) % len(self.points)][1]
            if outstanding[name] < capacity:
                return name
        # END SOLUTION


Ring = check("bounded-ring", Ring)

# %% [markdown]
# 8 replicas, 64 prefixes of uneven popularity; a cache holds 12 of them. A hit takes 0.3 s, a miss 1 s (simulated):

# %%
receipts.affinity(Ring)

# %% [markdown]
# Pure affinity has the best cache and one replica that drowns. The bound costs some hits where a prefix is hot, and
# just there it pays.
#
# ### Exercise 6 · scaling for a load that is not there yet (20 minutes)
#
# A replica that you order now serves after a cold start. How many should there be *then*? Least squares over the recent
# rates gives a line; the plan is never below the latest rate. What waits already has to be worked off, too.


# %%
def replicas_wanted(rates, waiting, capacity, utilization, cold_start_s, drain_s):
    """-> replicas that should be there when the cold start is over, 1 or more.

    rates: (seconds, requests per second), oldest first, times different; the last is now.
    Plan for the rate of the line through them at now + cold_start_s, but at least the latest rate,
    and `waiting` requests more in drain_s seconds. A replica serves `capacity` requests per second;
    plan for `utilization` of it."""
    # BEGIN SOLUTION
    middle = sum(at for at, _ in rates) / len(rates)
    mean = sum(rate for _, rate in rates) / len(rates)
    spread = sum((at - middle) ** 2 for at, _ in rates)
    slope = sum((at - middle) * (rate - mean) for at, rate in rates) / spread if spread else 0.0
    now, latest = rates[-1]
    coming = max(latest, mean + slope * (now + cold_start_s - middle))
    return max(1, math.ceil((coming + waiting / drain_s) / (capacity * utilization)))
    # END SOLUTION


replicas_wanted = check("replicas-wanted", replicas_wanted)

# %% [markdown]
# The load rises from 2 to 10 requests per second within ten minutes; a cold start takes 120 s. The same controller
# (`minillm/api/autoscale`), with your function that looks ahead and with one that does not (simulated):

# %%
show(figures.ramps)

# %%
receipts.autoscaling(replicas_wanted)

# %% [markdown]
# What is a cold start made of? A real one, `python -m minillm serve`, split by the server itself
# (`minillm_start_seconds` in its `/metrics`), alone and two at once:

# %%
measured.cold_start()

# %% [markdown]
# With a large model *load* dominates: 140 GB from a network disk at 1 GB/s are 140 s. With this small one it is the
# imports. A warm pool pays for all of it in advance.
#
# ## Break it
#
# Five breakdowns. In each of them every replica is sound, and every component does what it was told. Four run on the
# real engine with a simulated clock; the cold-start storm is simulated altogether.

# %%
show(figures.storm)

# %%
receipts.incidents()

# %% [markdown]
# - **Retry storm**: the burst lasts five seconds, the collapse for ever. After it the load is 60 % again, but each
#   client sends four times, and nobody waits any more for what the server computes. A state that keeps itself up after
#   its cause is gone is *metastable*. The cure is not capacity: it is a retry budget of 10 %, and a server that does not
#   begin what its client has given up. (Without any retries the fleet recovers by itself, and every failure is a user's.)
# - **Noisy neighbour**: exercise 4.
# - **Memory collapse**: a burst is admitted because its *prompts* fit. Then all grow, and preempt each other; tokens are
#   computed again. Keeping blocks free at admission ends it, at the price of a longer queue (lab 14, `reserve`).
# - **Long prompts**: 1,500 tokens in one pass hold all others for 0.8 s. Chunks that leave room in each step help the
#   short ones, and the long ones pay.
# - **Cold-start storm**: n replicas that start together and share one disk are all ready after n times 30 s, and none
#   before. One at a time there is one every 30 s: capacity comes sooner.
#
# ### Exercise 7 · read the metrics (25 minutes)
#
# You are on call and see one page of numbers. Which of the five is it, or none? Think first which number each of them
# *must* move; the fold says it.
#
# <details><summary>What each of them leaves behind</summary>
#
# - *Retry storm*: more requests arrive than clients have questions.
# - *Noisy neighbour*: no few prompts hold most tokens. One tenant has sent most, and one that has sent little waits long.
# - *Memory collapse*: preemptions, and tokens computed twice.
# - *Long prompts*: waits are long although few wait, and most prompt tokens belong to few requests.
# - *Cold-start storm*: replicas have been starting for longer than a start takes.
# </details>


# %%
def diagnose(page):
    """-> one of "retry storm", "noisy neighbour", "memory collapse", "long prompts",
    "cold-start storm" or "healthy".

    page.ttft_p99_s, .requests (that clients wanted), .attempts (that arrived), .preemptions,
    .computed, .needed (tokens put through the model, and those that had to be), .most_waiting,
    .tenants {name: (requests, ttft p99)}, .prompts: tokens of each prompt, .starting_s:
    how long the oldest start has been going on, .start_s: what a start takes alone.
    Healthy: ttft_p99_s up to 1, whatever else. A tenth more attempts than requests, a twentieth
    more tokens than needed or a start that goes on no longer than alone are everyday."""
    # BEGIN SOLUTION
    if page.ttft_p99_s <= 1:
        return "healthy"
    if page.starting_s > page.start_s:
        return "cold-start storm"
    if page.attempts > 1.5 * page.requests:
        return "retry storm"
    if page.preemptions and page.computed > 1.15 * page.needed:
        return "memory collapse"
    longest = sorted(page.prompts)[-max(1, len(page.prompts) // 10) :]
    if sum(longest) > 0.5 * sum(page.prompts):
        return "long prompts"
    return "noisy neighbour"
    # END SOLUTION


diagnose = check("diagnose-a-fleet", diagnose)

# %% [markdown]
# ## Where it loses (skip on a first reading)

# %%
receipts.losses()

# %% [markdown]
# At 30 % load two random choices are no better than taking turns, since both sometimes pick a busy replica although
# others are idle. Only exact counts find the idle one. Looking ahead costs replica hours, as the table of exercise 6
# shows. And one large queue before all replicas beats any routing, where requests can wait in the router; with a batch
# in each replica they mostly cannot.
#
# ## The same in production
#
# | here | elsewhere |
# |---|---|
# | `python -m minillm route --policy two-choices` or `prefix-affinity` | `power_of_two` and `cache_aware` in SGLang's gateway v0.3 and in [vLLM's router](https://blog.vllm.ai/2025/12/13/vllm-router-release.html) v0.1, a fork of it; `cache_aware`, the default, takes the longest shared prefix if that is more than 0.3 of the prompt (`--cache-threshold`), else the replica with the smallest tree, and the least loaded one once the busiest has 64 requests more and 1.5 times as many ([GPUStack's description](https://docs.gpustack.ai/gpustack-operator/main/docs/modules/model-deployment/routing/)) |
# | bound of the ring | `hash-balance-factor` of [HAProxy 2.8](https://docs.haproxy.org/2.8/configuration.html) |
# | retry budget | [Envoy](https://www.envoyproxy.io/docs/envoy/v1.31.0/api-v3/config/cluster/v3/circuit_breaker.proto) 1.31's `retry_budget`, 20 % by default |
# | `Reactive`, cool-down | [Kubernetes' HPA, autoscaling/v2](https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/): the same formula, `stabilizationWindowSeconds` 300, tolerance 10 % |
# | `load`, an open loop | [vLLM 0.11's `bench serve`](https://docs.vllm.ai/en/v0.11.2/cli/bench/serve/), by request rate and burstiness; its limit of concurrency makes it a closed loop |
#
# ## On a cluster
#
# ```bash
# python -m minillm serve --port 8001 &  python -m minillm serve --port 8002 &
# python -m minillm route --replicas http://127.0.0.1:8001,http://127.0.0.1:8002 --policy prefix-affinity
# python -m minillm load http://127.0.0.1:8000 --rate 4,8,16 --prefix 64 --groups 8 --figure load.png
# ```
#
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. p99 has tripled, p50 has not moved, the GPUs are no busier. Where do you look?**
# <details><summary>Answer</summary>
#
# At the split. If decode and prefill are as before, it is the queue: load near the knee, burstier arrivals, or a few
# long requests (the spread $c$ enters squared). Then by tenant and by prompt length. Averages of utilization over a
# minute hide bursts of seconds.
# </details>
#
# **2. Why not route to the replica with the fewest requests?**
# <details><summary>Answer</summary>
#
# One router with exact counts should. Several routers, or counts from a scrape, herd. Two random choices lose little
# and hardly herd. And the number of requests is a poor measure of work when prompts differ 100-fold.
# </details>
#
# **3. The service is overloaded by 10 %. What happens with and without a bounded queue?**
# <details><summary>Answer</summary>
#
# Without: the queue grows by 9 % of arrivals for as long as it lasts, and soon all requests are late: 100 % fail their
# limit. With: 9 % are refused at once, or somewhat more if q is small. The others wait at most about $q/\mu$ on
# average.
# </details>
#
# **4. On which metric do you scale?**
# <details><summary>Answer</summary>
#
# Not on GPU utilization: a decode loop keeps it near 100 % with one request. On requests inside per replica (waiting
# and running) or on the queue, with the cold start in mind: a replica ordered now does not serve what waits now.
# </details>
#
# ### Design questions
#
# **D1. A replica holds 32 requests at a time, each for 4 s. Peak 200 requests per second, p99 of the wait at most 1 s.
# How many replicas?**
#
# **D2. The load doubles within five minutes every morning, from 60 to 120 requests per second. A replica serves 8; a
# cold start takes 180 s. How large is the backlog of a reactive autoscaler that sees the rise a minute late, and what
# does the warm pool cost that avoids it?**

# %%
receipts.design()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: a replica serves 32 / 4 = 8 requests per second, so 25 replicas are the least. Their 800 slots
# would be 100 % busy. Behind one queue one more replica is enough (large pools need little slack): with 832 slots, 96 %
# load, 18 % wait, and p99 is 0.36 s by the table's Erlang C. Behind a
# router, with a queue in each replica, plan for 80 to 85 %: 30 replicas. The loss of one is then 3 %.
#
# D2: the rise is 0.2 requests per second in each second. Capacity follows it 240 s late (a minute to see it, 180 s to
# start), so at the end of the rise it lacks 0.2 · 240 = 48 requests per second, and the backlog is the area between two
# lines 240 s apart: 60 · 240 = 14,400 requests, less what slack there was. Six more
# replicas (48 / 8) that already serve bridge it. All day they cost 144 replica hours; started on a schedule half an
# hour before, 3. A pool that stands by is ordered a minute late: up to 60 · 60 = 3,600 still wait.
# </details>
#
# ### Capstone (open)
#
# Write a trace of a day for two tenants (JSON lines, `python -m minillm load --trace`), and run it against two
# `serve` replicas behind `route`. Choose policy, limits, queue and scaling; predict p99 and goodput for both tenants
# at 0.7 and 1.2 times the capacity, then measure. Defend in half a page what you would page somebody for.
#
# ## Can you answer them now?
#
# 1. Where do a request's seconds go, and which part of them grows with the load?
# 2. When does another replica help, and when does it come too late?
# 3. How does a fleet of sound replicas break down, what do its metrics say, and what ends it?
#
# Next: in [20 · Design a training run](20_design_training.ipynb) you size the other side, with the same kind of numbers.

# %%
finish("19_serving_fleet")
