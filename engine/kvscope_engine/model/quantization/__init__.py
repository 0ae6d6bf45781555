"""Weights that come quantized, as their files hold them: GGUF's blocks, GPTQ's and AWQ's words."""
