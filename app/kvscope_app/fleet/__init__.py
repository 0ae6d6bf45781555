"""Fleet window: many engines in one table, a row each."""
