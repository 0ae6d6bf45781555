"""Decoding after long contexts. Each contender fills its context once; rounds of decoding are then measured
alternately.
"""
