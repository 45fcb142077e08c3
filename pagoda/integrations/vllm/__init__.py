"""Tiers below vLLM's KV cache: what its connector is made of. Only `vllm_connector` and metrics.py import vLLM.

    scheduler process                                  each worker process (one a shard)
    SchedulerSide   ── Orders, with each step ──────>  WorkerSide
      keys.py         asks, loads, saves, leases         recall.py    asks: look up and load into staging memory
      explain.py                                         block_io.py  staging memory <-> vLLM's cache tensors
                    <── Replies, with its output ─────   Hierarchy    writes what is saved, in its own threads

The life of a prompt:

    1. vLLM asks how much we have beyond its own prefix cache. The blocks' keys go to the workers as an Ask, and vLLM is
       told to ask again; other requests run meanwhile.
    2. The workers look up and start to load. As soon as the first blocks are there, or nothing will be, they reply.
    3. vLLM allocates blocks for that many tokens and parks the request. The blocks go to the workers as a Load: what
       arrives is copied into them between steps. What does not arrive is reported as failed, and vLLM computes it.
    4. Each block that a step completes is a Save: copied out after the step, written by the tiers' threads.

The two sides talk only through what vLLM carries between its processes, so that any number of workers will do, and a
worker that dies takes nothing with it but its own tiers.
"""
