"""Resolution of model names to local files, with downloads."""
