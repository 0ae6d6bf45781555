"""What the model, a step and the KV cache take of a device's memory, and whether all of it fits."""
