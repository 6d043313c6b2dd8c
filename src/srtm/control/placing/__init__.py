"""Where publishers go: the Load Distributor, and everything else that moves them."""
