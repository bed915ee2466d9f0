"""Cryptography of the protocols: identities, certificates, sealed records, masks, secret sharing, Paillier."""
