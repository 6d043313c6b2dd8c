"""nsqlookupd, as the controller serves it."""
