"""Sources that watch running engines of other kinds (vLLM, SGLang, llama.cpp) from outside. Uses no Qt."""
