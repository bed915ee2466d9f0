"""FedMVMF (PrivMVMF under an encrypted sum)."""
