"""Planning: size a deployment by arithmetic, and replay request traces through the real tree, without a model.

    config.json ──shape──> ModelShape ──footprint──> bytes of a token ──capacity──> users, tiers, costs
                                      └──work──────> seconds of prefill and decode ──┘

    trace file ──traces──> TraceRequest, TraceRequest, ...  ──replay──>  hit rate, evictions, waste of a policy
                           (ids of prefix blocks, seconds)  ──belady──>  the most that any policy could hit
                                                            ──tiered_replay──>  hits by tier, bytes moved, TTFT
                                                            ──fleet──>  the same of several replicas behind a router

One block of the trace is one block of the tree. Its id stands for its tokens and for all tokens before them, so the
tree runs with a block size of one pseudo-token, and the trace says how many tokens that is.
Nothing here needs torch, a model or the network.
"""
