"""Benchmarks: `kvscope-engine bench NAME`."""
