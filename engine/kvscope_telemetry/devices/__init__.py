"""What GPUs, memory and cores do: read from NVML and `/proc`, and joined to where the memory went. No torch, no Qt."""
