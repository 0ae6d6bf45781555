"""The prefix index (which block contains which prefix), and the history that explains cache misses.

Independent of the block pool.
"""
