"""Other libraries' attention over our pages, taken for prompts where it is installed, fits and is faster."""
