"""LoRA adapters: read from PEFT's files, kept in host memory, applied to the rows of a batch that ask for them."""
