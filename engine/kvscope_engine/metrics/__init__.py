"""Prometheus' `/metrics`, filled from telemetry alone: vLLM's names where the meaning is the same, else `kvscope_`.

`engine_watch` follows the telemetry socket like any other subscriber, so that the engine's thread pays nothing;
`tally` and `histories` count what frames tell; `vllm_families` and `own_families` name it; `page` is the page that the
HTTP process mounts.
"""
