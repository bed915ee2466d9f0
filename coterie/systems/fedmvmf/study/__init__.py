"""Tables of FedMVMF."""
