"""View of how other allocators would place the running requests in the same memory."""
