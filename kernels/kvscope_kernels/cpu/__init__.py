"""CPU operations, compiled from C on the machine that runs them if it has a compiler. Each has a torch
reference as fallback.
"""
