"""The prefix index (which block holds which prefix), and why a prefix is no longer cached. Knows no pool."""
