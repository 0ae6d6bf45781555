"""Inside a process that runs transformers' continuous batching: `watch` is called for a manager of it."""
