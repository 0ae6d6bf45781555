"""KV events, as vLLM and SGLang publish them and as our engine does: what is cached, block by block, over ZeroMQ."""
