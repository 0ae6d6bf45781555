"""`kvscope bench`: how smoothly this machine draws a large pool under heavy telemetry."""
