"""Model loading, from a name to a model on its device: download, configuration, weights, support checks."""
