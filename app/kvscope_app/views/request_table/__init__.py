"""The request table: columns worked out with numpy, the Qt model over them, how cells are painted."""
