"""Fragmentation over time: state of each address, lengths of free runs, and the used fraction of held blocks."""
