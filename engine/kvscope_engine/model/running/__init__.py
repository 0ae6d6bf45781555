"""Running a step on the device: inputs, attention, KV storage, graphs, and the memory all of it takes."""
