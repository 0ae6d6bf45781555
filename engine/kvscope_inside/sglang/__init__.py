"""Watches SGLang's scheduler process: hooks record what the scheduler and its pools do, and a thread publishes it."""
