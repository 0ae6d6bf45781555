"""Engines that a Prometheus server scrapes: their present state, and their past as far as Prometheus keeps it."""
