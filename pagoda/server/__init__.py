"""The HTTP server: OpenAI-compatible requests in, text out, and the figures of the engine behind it.

    socket ── app.py ── auth.py ──────────── key -> namespace (tenant)
                 │
                 ├── openai/chat.py ─┐  body.py: bytes -> JSON      schema.py: JSON -> SamplingParams
                 ├── openai/completions.py ┘ tokenizing happens in a thread, never on the event loop
                 │        │
                 │   openai/respond.py ── stream.py ── backend.py (what the server asks of an engine)
                 │        └ one JSON body, or SSE events; a client that leaves aborts its requests at once
                 ├── anthropic/ (/v1/messages: cache_control breakpoints become leases)
                 └── metrics.py ── /metrics, fed by the engine as its observer

Whatever is refused leaves as `{"error": {"message", "type", "param", "code"}}` (errors.py), with an id (ids.py).
"""
