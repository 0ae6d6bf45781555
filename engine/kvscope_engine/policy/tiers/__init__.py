"""Host memory and disk below the pool: what sinks, what comes back, at what cost. Moves no bytes."""
