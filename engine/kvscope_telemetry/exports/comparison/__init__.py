"""Two recordings compared: how they lie side by side, their figures, and whether these differ by more than chance."""
