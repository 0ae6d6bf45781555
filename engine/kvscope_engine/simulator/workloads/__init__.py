"""Workloads of a simulation: traces, generators, recordings."""
