"""KV events as vLLM, SGLang and kvscope's engine publish them over ZeroMQ: they report which blocks are cached."""
