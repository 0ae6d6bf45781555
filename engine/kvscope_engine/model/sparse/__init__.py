"""Decodes that read a part of their blocks: which layers may, which blocks they choose, what is told of the rest."""
