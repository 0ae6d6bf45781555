"""Texts of KV blocks in recordings: which blocks to request, how texts are encoded, and how they are found. Does no
file I/O.
"""
