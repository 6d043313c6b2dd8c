"""Verbs that serve, and the calibration of what they can carry."""
