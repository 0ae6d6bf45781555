"""Doing things to a running engine from the window: hold, step, preempt, pin, evict, limits. Knows no view."""
