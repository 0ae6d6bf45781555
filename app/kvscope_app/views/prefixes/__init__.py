"""The prefix tree of cached texts; `kvscope_telemetry.prefixes` builds it."""
