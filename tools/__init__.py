"""Programs that write files of this repository: parts of the documentation, and constraints.txt."""
