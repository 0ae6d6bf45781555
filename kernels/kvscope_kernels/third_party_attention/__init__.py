"""Attention of other libraries over our block pool. Used for prompts if a library is installed, supports the
model and is faster.
"""
