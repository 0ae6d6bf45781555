"""Weights of 4 and 8 bits in groups, and linear layers with them on a GPU. The implementations for CPUs are in
`cpu`.
"""
