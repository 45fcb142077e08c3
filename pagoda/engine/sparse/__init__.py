"""kv_policies in the engine: sparsity admits them, hook has the decoder follow them, the rest serves recalling."""
