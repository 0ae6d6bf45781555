"""Mixture of experts: the feed-forward layers of the experts to which a step's tokens are routed."""
