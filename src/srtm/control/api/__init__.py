"""The controller's HTTP under /v1: routes, shapes, the feed of the page, metrics."""
