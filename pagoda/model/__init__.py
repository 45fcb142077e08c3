"""Models: a name -> spec, weights and tokenizer; a ForwardBatch over a paged pool -> logits; logits -> tokens.

    registry   name -> files             spec, rope   config.json -> shapes and constants
    gguf       GGUF -> HF folder         weights      safetensors -> fused tensors
    loader     all of it in one call     decoder      ForwardBatch + KV views -> logits (hooks.py: per-layer hooks)
    tokenizer  text <-> ids, chat        sampler      logits -> token ids

Nothing here owns a KV pool or knows a request: the engine passes both in, as views and rows.
"""
