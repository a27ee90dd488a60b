"""An OpenAI-compatible HTTP server over the engine: `python -m minillm serve`.

    client ── HTTP ──▶ app.py ── protocol.py: what is asked for ──▶ AsyncLLM (minillm/serve/async_engine.py)
           ◀── SSE or JSON ── answers.py: what comes back ◀── deltas ──┘

    entry.py      a request's id, key and size, and whether it comes from this machine
    app.py        routes: a request is parsed, admitted, given to the engine, answered
    protocol.py   requests: fields that are served, those that are refused, and their SamplingParams
    answers.py    bodies and stream chunks in OpenAI's shape
    connection.py what ends when a client goes away, reads nothing, or the engine fails
    limits.py     keys, sizes, open requests; every refusal has OpenAI's error body
    tenants.py    what each tenant may have: rate, caps, weight (fair sharing: minillm/serve/schedule/fair.py)
    errors.py     how an exception becomes an answer
    metrics.py    counters and histograms for Prometheus
    run.py        uvicorn: one process, one event loop, the engine in its own thread; SIGTERM drains
    page.html     a page to try it on, without anything from elsewhere
    router/       several servers behind one address: `python -m minillm route`
    autoscale/    how many of them there should be
    load/         requests at given rates to any such server, and what their callers got

Nothing here decides what a token is: `LLM.generate` with the same SamplingParams gives the same answer.
"""
