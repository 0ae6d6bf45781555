"""The commands of `kvscope-engine`, one file each."""
