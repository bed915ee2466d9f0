"""The third party: certificate authority and directory of public keys."""
