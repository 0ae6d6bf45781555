"""CPU operations in C, which are compiled on the machine that runs them if it has a compiler. Each operation
has a torch reference as fallback.
"""
