"""Layers that replace or extend those of transformers' models (attention, fused, recurrent, LoRA), and sampling."""
