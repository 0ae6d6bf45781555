"""Map of the segments and blocks of PyTorch's allocator, requested on demand."""
