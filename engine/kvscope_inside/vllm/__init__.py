"""Inside vLLM's engine core (V1): hooks note what its scheduler and block pool do, a thread tells it."""
