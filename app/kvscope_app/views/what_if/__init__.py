"""What if: the requests running now, placed by other allocation policies into the same memory."""
