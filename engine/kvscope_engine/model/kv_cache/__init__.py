"""Storage of the KV cache: blocks, states of recurrent layers, KV groups, virtual memory and lower tiers."""
