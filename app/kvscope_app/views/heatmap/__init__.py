"""Fragmentation over time: what each address held, the lengths of free runs, and the used share of held blocks."""
