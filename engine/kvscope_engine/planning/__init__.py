"""Plans a model's GPU memory, for inference and for training, from its configuration alone.

No weights are loaded: shapes come from transformers' own model built without memory, activations from its own forward
and backward passes on tensors without data. Independent of a GPU, block pool and scheduler.
"""
