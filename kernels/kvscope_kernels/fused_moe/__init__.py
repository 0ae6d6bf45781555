"""Mixture of experts: the products of the experts that a step's tokens were sent to."""
