"""Products with a model's unquantized weights."""
