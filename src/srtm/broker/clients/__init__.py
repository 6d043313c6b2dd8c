"""Clients of a broker: their bytes, their commands, and what a subscriber was sent."""
