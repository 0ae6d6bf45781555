"""Recurrent layers (Mamba, linear attention) with per-request states in `StateStorage`."""
