"""Benchmarks for developers of kvscope, outside the wheel: `python -m benchmarks.NAME` from the repository's root.

Benchmarks that users run are commands: `kvscope-engine bench NAME`.
"""
