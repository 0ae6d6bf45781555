"""Watches running engines of other kinds (vLLM, SGLang, llama.cpp) as sources of kvscope telemetry. Uses no Qt."""
