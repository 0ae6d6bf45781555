"""Commands of `kvscope-engine`, one module each."""
