"""Each operation beside its reference and what else is installed, all of them timed in the same rounds."""
