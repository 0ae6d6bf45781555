"""What a simulation is to serve: traces, generators, recordings."""
