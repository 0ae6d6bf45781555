"""One source and the state rebuilt from it: what views read. No widgets."""
