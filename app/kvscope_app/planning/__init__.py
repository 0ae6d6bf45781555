"""What a model would take of a GPU: the questions, the child process that answers them, and the sheet that shows it."""
