"""How a sum over a cohort is formed: in clear, or under masks.  Protocols without I/O: bytes in, bytes out."""
