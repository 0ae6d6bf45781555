"""Which block holds which prefix, and why one is not there any more. Knows no pool."""
