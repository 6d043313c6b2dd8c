"""How jobs read a trace, and what their tasks and the driver tell each other."""
