"""Prometheus' `/metrics`, filled from telemetry alone: vLLM's names where the meaning is the same, else `kvscope_`.

`page` follows the telemetry socket like any other subscriber, so that the engine's thread pays nothing; `tally` counts
what frames tell; `vllm_families` and `own_families` name it. The HTTP process of our engine mounts the page; `serve`
is a process of its own, for others.
"""
