"""From files to a model on its device: configuration, weights, what is supported."""
