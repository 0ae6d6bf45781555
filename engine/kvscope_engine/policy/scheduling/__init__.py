"""Decides which requests run in a step and with how many tokens: admission, preemption, block tables, and
their events.
"""
