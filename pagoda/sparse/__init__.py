"""Token-level sparsity: which of a request's KV entries it still needs, in a paged and shared cache.

    kv_policy ──> spec.py ──> a policy (streaming, h2o, snapkv, pyramid: one a file, each with its paper)
                                 │ open
                                 v
    engine ── around each step ─> sequence.py: when to compress, what was seen, where entries are now
                                 │ compact
                                 v
    kv/compaction.py: private blocks, fewer than before     store.py: moves entries, turns keys

The tree and the tiers hold exact KV only. Until its first compaction a sparse request reads and commits it as any other
does; from then on its blocks are its own.
"""
