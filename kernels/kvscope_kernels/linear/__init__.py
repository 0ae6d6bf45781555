"""Linear layers with a model's unquantized weights."""
