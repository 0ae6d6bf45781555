"""A live engine as a source: the reading thread and the updates that it produces."""
