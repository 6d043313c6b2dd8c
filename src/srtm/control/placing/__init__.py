"""Where publishers belong: the Load Distributor, and everything else that moves them."""
