"""Host memory and disk below the pool: what is offloaded, what is loaded back, and at what cost. Copies no bytes."""
