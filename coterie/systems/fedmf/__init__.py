"""FedMF."""
