"""Import: files of other origins become traces."""
