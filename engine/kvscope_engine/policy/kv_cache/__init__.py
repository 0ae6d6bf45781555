"""The block pool: allocation, contents and changes of blocks. Independent of the scheduling order."""
