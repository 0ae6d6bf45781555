"""Attention of other libraries over our block pool, used for prompts if installed, supported and faster."""
