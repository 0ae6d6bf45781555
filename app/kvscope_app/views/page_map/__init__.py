"""The page map: one cell a block of the KV cache."""

from kvscope_app.views.page_map.view import PageMapView

__all__ = ["PageMapView"]
