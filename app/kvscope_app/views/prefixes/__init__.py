"""The prefix tree: what is cached, joined where texts begin alike. Trees are `kvscope_telemetry.prefixes`' to make."""
