"""Verbs of applications: publish, subscribe, make a load."""
