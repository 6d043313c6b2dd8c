"""The control plane: discovery, contracts, the Load Distributor, the TB Adaptor."""
