"""Memory of the KV cache in pages behind reserved addresses, for the allocator `virtual`."""
