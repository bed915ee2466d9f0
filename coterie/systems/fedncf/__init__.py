"""FedNCF."""
