"""What replaces or extends layers of transformers' models: attention, fused and recurrent layers, LoRA, sampling."""
