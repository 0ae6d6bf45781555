"""GGUF files: reads headers, converts files to safetensors, and caches converted files."""
