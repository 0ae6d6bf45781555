"""Sources that watch external engines (vLLM, SGLang, llama.cpp) from outside. Uses no Qt."""
