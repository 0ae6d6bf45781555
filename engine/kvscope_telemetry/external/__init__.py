"""A running vLLM or SGLang as a source of ours: its KV events and metrics, told in our own messages. Knows no Qt."""
