"""Bookkeeping of host memory and disk below the pool: decides which blocks are offloaded and loaded back, and
estimates the cost. A `TierMover` outside this package copies the bytes.
"""
