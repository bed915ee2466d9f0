"""References and tables of FedMF."""
