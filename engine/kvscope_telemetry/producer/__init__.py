"""Build frames from the state of an engine: our own, a simulated one, or one that is watched."""
