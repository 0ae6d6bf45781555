"""From a model's name to files on this machine."""
