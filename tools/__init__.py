"""What writes parts of the documentation from the code."""
