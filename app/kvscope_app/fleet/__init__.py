"""The fleet's window: many engines in one table, a row each; one of them opens in a window of its own."""
