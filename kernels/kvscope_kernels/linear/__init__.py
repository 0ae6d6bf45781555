"""Products with a model's weights as they are."""
