"""Settings saved between runs: a typed struct in a file, and the object that reads and changes it."""
