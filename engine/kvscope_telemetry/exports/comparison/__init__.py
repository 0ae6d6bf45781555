"""Two recordings compared: how they lie side by side, their key figures, and whether these differ more than they vary."""
