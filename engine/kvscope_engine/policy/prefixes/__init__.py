"""The prefix index, which finds the block with a cached prefix, and the history that explains cache misses.

Independent of the block pool.
"""
