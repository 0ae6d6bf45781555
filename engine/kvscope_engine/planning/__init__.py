"""Plans a model's GPU memory, for inference and for training, from its configuration alone.

Nothing here has weights: shapes come from transformers' own model built without memory, activations from its own
forward and backward passes run on tensors without data. Knows no GPU, no pool and no scheduler.
"""
