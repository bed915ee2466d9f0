"""References, attacks and tables of FedNCF."""
