"""Recurrent layers (Mamba, linear attention) that keep their states in the KV cache."""
