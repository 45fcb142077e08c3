"""The engine: continuous batching over a paged, prefix-shared KV cache.

    request.py    Request, and its Samples: what is scheduled
    policy.py     the order of the queue
    scheduler.py  which tokens the next step computes; preemption
    runner.py     the step as tensors, through the model
    core.py       EngineCore: one step after another, on one thread
    intake.py     what a caller asks for, held against what the engine has
    choosing.py   tokens from logits: sampling, stops, beams
    forking.py    samples, beams and forks on shared blocks           beam.py
    pressure/     the pressure ladder at work: levels, refusals
    sparse/       kv_policies
    blend/        passages reused anywhere
    lease_desk.py answers to the leases that requests ask for            lease_bounds.py: how much all may hold
    history.py    the last requests, for explanations                 request_stats.py: what observers are told
    audit.py      hits computed again and compared
    assembly.py   the cache of an Engine: tiers opened, what its KV is the KV of
    engine.py     Engine: loads a model, sizes the pool, generates offline
    aio.py        AsyncEngine: the same on a thread of its own, streaming to asyncio

In: token ids and SamplingParams. Out: RequestOutputs. The scheduler owns leases; the core owns requests.
"""
