"""Several replicas behind one address: which of them gets a request, and what happens when one dies.

    client ──> router.py ── prompts.py: what its prompt shares ──> placement.py ──> relay.py ──> replica
                   │                                                │  routing.py   the decision, pure
                   │                                                │  index.py     what replicas have
                   └ watch.py: alive? ── subscriber.py <── events ──┴─ publisher.py, in the replica

wire.py is events as bytes, curve.py who may read them; local.py runs replicas as processes of one machine. The router
loads no model and no torch. `pagoda replay --replicas` simulates with the same decision.
"""
