"""Events as a table or as cards."""
