"""Layers that replace or extend layers of transformers' models (attention, fused, recurrent, LoRA), and sampling."""
