"""Model loading, from a model name to a model on its device: download, configuration, weights and checks that the model
is supported.
"""
