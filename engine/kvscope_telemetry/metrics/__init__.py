"""Prometheus metrics (`/metrics`) computed from telemetry alone, with vLLM's names where the meaning is the same, else
`kvscope_`.

`metrics_page` subscribes to the telemetry socket like any other client, so that it costs the engine's thread nothing.
`tally` accumulates totals from frames; `vllm_families` and `own_families` give them names. Our engine's HTTP process
mounts the page; for other engines, `serve` runs it in a separate process.
"""
