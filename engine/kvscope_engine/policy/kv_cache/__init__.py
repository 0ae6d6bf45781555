"""The block pool: block allocation, block contents, and changed rows. Independent of the scheduling order."""
