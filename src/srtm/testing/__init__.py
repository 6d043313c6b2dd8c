"""Tools for tests, also for those of users: clusters in virtual time."""
