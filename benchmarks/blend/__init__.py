"""Passages reused anywhere: what it saves and what it costs. `python -m benchmarks.blend`

    full      every prompt is computed whole
    prefix    prefix caching: passages were seen before, in other orders
    naive     passages reused as they were computed alone, nothing anew; the guard is off
    5%, ...   that share of their tokens is computed anew; the guard is off
    guarded   as served: 15%, more where the guard wants it, and all where the model is unsure of how to begin

Passages are real text (the language reference and the source of Python's standard library, PSF licence), each with a
planted line. `lookup` asks for one passage's; `hop` for a value that one passage gives by the name another defines.
"""
