"""View that compares how other KV block allocators would place the running requests in the same memory."""
