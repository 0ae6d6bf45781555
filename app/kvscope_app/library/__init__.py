"""The recordings that kvscope wrote or opened: a list of them on disk, and the sheet that shows it."""
