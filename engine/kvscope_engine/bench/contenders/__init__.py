"""Contenders of the benchmarks: our engine and its peers, behind one small interface."""
