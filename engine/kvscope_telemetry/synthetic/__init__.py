"""An engine without a model, on real sockets: for the desktop, tests and benchmarks."""
