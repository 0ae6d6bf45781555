"""Icons and other data files. The package contains no code."""
