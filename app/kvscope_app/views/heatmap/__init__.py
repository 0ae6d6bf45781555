"""Fragmentation over time: which addresses held what, how the free ones lie, and how much of what is held is used."""
