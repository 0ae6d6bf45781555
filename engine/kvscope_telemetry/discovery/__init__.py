"""Finds engines that run, so that a person need not type their addresses."""
