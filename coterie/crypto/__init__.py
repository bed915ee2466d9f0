"""Cryptography: explicit bytes, identities and prekeys, sealed records, the certificate authority."""
