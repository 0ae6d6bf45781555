"""What if: the requests running now, placed by other allocation policies into the same memory."""

from kvscope_app.views.what_if.view import WhatIfView

__all__ = ["WhatIfView"]
