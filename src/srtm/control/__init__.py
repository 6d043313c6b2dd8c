"""The control plane: discovery, Load Distributor, TB Adaptor."""
