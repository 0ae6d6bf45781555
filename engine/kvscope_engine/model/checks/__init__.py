"""What is proven at load: that our attention, and whatever replaces a part, gives what transformers gives."""
