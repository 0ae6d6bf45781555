"""Comparison of two recordings: their alignment in time, their figures, and whether differences exceed random
variation.
"""
