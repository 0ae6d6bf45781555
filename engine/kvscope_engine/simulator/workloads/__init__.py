"""Workloads of a simulation, from traces, generators and recordings."""
