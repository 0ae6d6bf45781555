"""KV events, as vLLM, SGLang and our engine publish them over ZeroMQ: which blocks are cached."""
