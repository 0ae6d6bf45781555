"""GGUF files: their header, their conversion, and where converted ones are kept."""
