"""The load generator and its panel."""
