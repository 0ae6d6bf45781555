"""Checkpoints with quantized weights in their files' own formats, such as GGUF blocks or packed GPTQ and AWQ words."""
