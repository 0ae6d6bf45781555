"""Inside SGLang's scheduler process: hooks note what the scheduler and its pools do, a thread tells it."""
