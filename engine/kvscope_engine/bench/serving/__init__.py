"""`bench serve`: workloads, a client that times answers, what the times say, and servers as processes."""
