"""What is remembered between runs, as one typed struct in one file; who holds it, and who changes it."""
