"""View of the tree of cached prefixes; `kvscope_telemetry.prefixes` builds the tree."""
