"""Debugger actions on a running engine: pause, step, preempt, pin, evict, and change limits."""
