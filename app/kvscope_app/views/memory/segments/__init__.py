"""Dialog with a map of the memory segments of PyTorch's allocator and the blocks in them, requested on demand."""
