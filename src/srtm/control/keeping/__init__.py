"""Where a controller's state is kept: in a file, or in a bucket that several controllers share."""
