"""Secure sums over a cohort: in clear, masked, or encrypted.  Protocols without I/O: bytes in, bytes out."""
