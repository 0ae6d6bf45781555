"""LoRA adapters: read from PEFT's files, stored in host memory, applied to the rows of a batch that use them."""
