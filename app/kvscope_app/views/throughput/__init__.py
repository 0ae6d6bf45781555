"""Tokens, requests, KV usage and latencies over time."""
