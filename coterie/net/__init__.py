"""gRPC channels and servers over mutual TLS: authentication, authorisation, limits, metering, transcripts."""
