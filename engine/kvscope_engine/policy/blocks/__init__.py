"""The block pool: who may have a block, what is in it, and which rows changed. Knows nothing of the order
of service.
"""
