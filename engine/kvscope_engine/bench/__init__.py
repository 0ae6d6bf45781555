"""Benchmarks of the engine, run with `kvscope-engine bench NAME`."""
