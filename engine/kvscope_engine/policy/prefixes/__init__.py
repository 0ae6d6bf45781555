"""Which block holds which prefix, and why a prefix is no longer cached. Knows no pool."""
