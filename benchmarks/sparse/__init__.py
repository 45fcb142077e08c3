"""What sparse KV costs in quality and saves in memory, every policy on the same conversations.

conversations.py   a long text, a question known when it is compressed, and three that are not
quality.py         right answers, their negative log-likelihood, KL and agreement, against kept fractions
streaming.py       perplexity along a text far longer than the model's context
throughput.py      decoding at 8k tokens: speed, and blocks held
presses.py         the same conversations through NVIDIA's kvpress, in an environment of its own (presses_side.py)
report.py          tables, JSON, PNG
"""
