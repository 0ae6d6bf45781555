"""Allocation policies: which block a request gets next. `paged` is the default; the others are for comparison."""
