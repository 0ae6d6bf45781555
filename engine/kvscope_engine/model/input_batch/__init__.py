"""Inputs of a step: numpy arrays made from the scheduler's plan, and the device tensors to which they are copied."""
