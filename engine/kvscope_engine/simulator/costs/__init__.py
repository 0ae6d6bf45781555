"""How long a step takes on a device: the model of it, its fit, its file."""
