"""Writes traces for Perfetto. The twenty or so protobuf fields that are needed are encoded without a protobuf
library.
"""
