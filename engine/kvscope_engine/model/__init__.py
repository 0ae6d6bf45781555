"""Finding and loading a model, and running steps of it on the device."""
