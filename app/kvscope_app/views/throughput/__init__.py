"""View of tokens, requests, KV usage and latencies over time."""
