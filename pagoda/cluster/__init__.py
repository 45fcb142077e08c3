"""Several replicas behind one address: which of them gets a request.

routing.py   the decision, as pure bookkeeping; `pagoda replay --replicas` simulates with it
"""
