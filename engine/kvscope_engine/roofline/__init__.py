"""The least that a step has to move and compute, and the most that the device can do."""
