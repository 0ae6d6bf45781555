"""The desktop: windows, views and console. Imports neither torch nor the engine."""
