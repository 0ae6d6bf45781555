"""Writes traces for Perfetto. Encodes some twenty fields of its protobuf messages without a protobuf library."""
