"""Measurements. Speed is printed as ratios within one run, never asserted."""
