"""Scheduling: admission, preemption, block tables, and events of requests."""
