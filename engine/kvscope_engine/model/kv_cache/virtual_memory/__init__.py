"""Memory for `--allocator virtual`: addresses are reserved at the start, and pages are mapped as blocks are used."""
