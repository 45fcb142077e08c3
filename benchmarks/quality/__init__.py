"""What a variant of the engine costs in quality, measured against the full-precision run of the same model.

    cases.py     what is read: real text, answers to generated tasks, the full run's own continuations
    tasks.py     needle, multi-key, variable-tracking and long-chat questions with known answers
    forced.py    an engine that is made to read given tokens, and the logits it had before each of them
    compare.py   two rows of logits -> KL divergence, negative log-likelihoods, agreement; bootstrap intervals
    suite.py     all engines over all cases, in step
    gsm8k.py     free answers to GSM8K questions: do they agree with the full run's?
    speed.py     tokens a second after a long context
    quantized_cache.py, quantized_side.py    the same through Transformers' QuantizedCache, in another environment
    report.py    table, JSON, PNG

Everything goes through the engine: its scheduler, its cache, its paged kernels. A variant is a name and keyword
arguments of `Engine`, so whatever `Engine` can be told (a KV format, a sparse policy) can be measured.
"""
