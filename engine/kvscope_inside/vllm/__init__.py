"""Watches vLLM's engine core (V1): hooks record what its scheduler and block pool do, and a thread publishes it."""
