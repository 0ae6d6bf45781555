"""The load generator, which submits many requests to the engine, and its panel."""
