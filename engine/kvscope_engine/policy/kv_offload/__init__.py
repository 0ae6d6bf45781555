"""Host memory and disk below the pool: which blocks are offloaded and loaded back, and at which cost. Copies no
bytes.
"""
