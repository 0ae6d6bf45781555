"""Model loading, from a name to a model on its device: download, configuration, weights, checks of what is
supported.
"""
