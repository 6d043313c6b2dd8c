"""Access: credentials, roles, and the rule of every path."""
