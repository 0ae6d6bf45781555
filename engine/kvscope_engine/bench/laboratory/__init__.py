"""Ways to attend to a long context, side by side on the keys and values of a real model. Not used in service."""
