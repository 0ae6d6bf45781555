"""One source and the state rebuilt from it, which views read. Contains no widgets."""
