"""Sparse decode: which layers read only a part of their blocks, which blocks they choose, and what is reported of the
others.
"""
