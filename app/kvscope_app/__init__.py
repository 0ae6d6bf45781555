"""The desktop: windows, views and console. Knows neither torch nor the engine."""
