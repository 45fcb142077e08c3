"""The memory: paged KV blocks, shared by prefix, evicted by policy.

                 tokens, scope                                       block ids
    engine ──> KVCache ──────> RadixTree   which prefixes are known ────────┐
                  │  └───────> Allocator   which blocks are free, held      ├──> Lease: a block table per layer group
                  │                        (ref counts), cached             │
                  └──────────> BlockPool   the bytes, as KVLayout says <────┘

In: token ids and a Scope. Out: a Lease, whose block tables say where its KV is and how much of it is there already.

Who owns what: the pool owns memory; the allocator owns the state of every block; the tree owns the knowledge of which
tokens a block holds; a lease owns references to its blocks. The tree decides what goes, the cache frees it.
Nothing here knows of requests, models or HTTP, and all but the pool and the tiers work without torch.
"""
