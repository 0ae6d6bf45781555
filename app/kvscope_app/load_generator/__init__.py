"""Load generator, which submits many requests to the engine: its settings, prompts and request loop."""
