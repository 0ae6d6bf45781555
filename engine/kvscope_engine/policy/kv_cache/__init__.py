"""The block pool: block allocation, block contents, and changed rows. Does not know the order of service."""
