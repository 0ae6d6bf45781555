"""Interventions on behalf of clients: single steps while the engine is held, and whose a pin is."""
