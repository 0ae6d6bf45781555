"""View of the prefix tree of cached texts; `kvscope_telemetry.prefixes` builds the tree."""
