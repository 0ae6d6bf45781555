"""Watches a running vLLM or SGLang as a source: turns its KV events and metrics into our messages. Knows no Qt."""
