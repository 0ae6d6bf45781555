"""Host memory and disk below the pool: what is offloaded, what comes back, at what cost. Moves no bytes."""
