"""KV events, which vLLM, SGLang and kvscope's engine publish over ZeroMQ to report which blocks are cached."""
