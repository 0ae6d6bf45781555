"""Measurements of `bench gpu`, and the `Setting` (model, options, memory limit) that they share."""
