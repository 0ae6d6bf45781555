"""Benchmark of decoding after long contexts. Each contender fills its context once; then rounds of decoding of all
contenders alternate.
"""
