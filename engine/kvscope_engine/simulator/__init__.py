"""Simulator: runs the scheduler and the block pool on a simulated clock, with workloads, a cost model, and a report.

Uses no tensors.
"""
