"""Requests, block pool, prefix index and scheduler: decide which request gets which block, and which requests run.

Imports no torch, so that the simulator can run the same code.
"""
