"""Fleet window: many engines in one table, a row each. An engine opens in its own window."""
