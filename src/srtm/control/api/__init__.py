"""The controller's HTTP API under /v1: routes, JSON shapes, the page's feed, metrics."""
