"""The CPU's operations compiled from C on the machine that runs them, where it has a compiler; optional throughout."""
