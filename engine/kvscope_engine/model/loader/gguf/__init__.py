"""GGUF files: reading of headers, conversion to safetensors, and the cache of converted files."""
