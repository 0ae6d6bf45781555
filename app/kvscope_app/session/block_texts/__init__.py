"""Block contents as text for all views, from the engine or a recording."""
