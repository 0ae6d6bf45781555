"""Finds and loads a model, and runs its steps on the device."""
