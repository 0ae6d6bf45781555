"""Inputs of a step: numpy arrays made from the scheduler's plan, and the device tensors they are copied to."""
