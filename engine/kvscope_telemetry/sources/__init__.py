"""A live engine as a source: the reading thread and what it hands over."""
