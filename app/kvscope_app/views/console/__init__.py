"""Console: chat with the engine in several conversations, and a load generator."""
