"""From a model's name to a model on its device: download, configuration, weights, what is supported."""
