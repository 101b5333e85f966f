"""One OpenAI-compatible endpoint over N engines: routing by policy, streaming, back-pressure, failover.

``serving`` puts it together. ``client`` speaks HTTP with clients and ``upstream`` with engines; ``budgets`` reads a
request's k; ``dispatch`` keeps what is known of each rank and asks the route policy; ``exchange`` carries one request
through, ``router`` admits it; ``launch`` says how an engine starts, ``replica`` starts, watches and restarts it;
``probe`` asks it how it is, and ``state`` answers that inside the engine's own server.
"""
