"""Import: files of others become traces."""
