"""What sparse KV costs in quality and saves in memory, every policy on the same conversations.

conversations.py   a long text, a question known when it is compressed, and three that are not
quality.py         an engine is asked, under every policy at every kept fraction
presses.py         the same conversations through NVIDIA's kvpress, in an environment of its own (presses_side.py)
records.py         each conversation under each policy as a line of a file, written as it ends
summary.py         records -> right answers, negative log-likelihoods, KL, with intervals
streaming.py       perplexity along a text far longer than the model's context
throughput.py      decoding at 8k tokens: speed, and blocks held
report.py          tables, JSON, PNG
"""
