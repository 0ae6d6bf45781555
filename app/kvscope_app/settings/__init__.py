"""Settings saved between runs: one typed struct in one file, and the object that holds and changes it."""
