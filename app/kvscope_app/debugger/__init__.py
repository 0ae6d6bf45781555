"""Doing things to a running engine from the window: pause, step, preempt, pin, evict, limits. Knows no view."""
