"""Measurements of `bench gpu`, and the setting that they share."""
