"""Discovery: the controller as an nsqlookupd."""
