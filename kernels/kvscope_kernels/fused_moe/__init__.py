"""Mixture of experts: the products of the experts to which a step's tokens are routed."""
