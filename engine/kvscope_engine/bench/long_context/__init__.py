"""Decoding after long contexts: each contender fills its context once, and rounds of decoding are then measured in
turns.
"""
