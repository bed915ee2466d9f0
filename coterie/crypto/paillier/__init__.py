"""Packed Paillier encryption: vectors of integers that can be added under encryption.

Keys are in ``keys``, random factors of ciphertexts in ``obfuscators``, slots in ``packing``, vectors and their sums in
``vector``, byte formats in ``format``, conversion to ``phe`` in ``stock``.  Needs the extra ``paillier``.

Assumed: composite residuosity modulo n^2 (Paillier 1999), hence that n is hard to factor; ``obfuscators`` states the
further assumptions of modes C and D.  A ciphertext carries no authentication: who can encrypt can also add a
constant, double or mix.  Look-ups in tables and powers take time that depends on secrets, so whoever can measure the
caches of a process that holds a secret key, or draws obfuscators, learns about them.
"""

from coterie.crypto.paillier.format import from_bytes, to_bytes
from coterie.crypto.paillier.keys import PublicKey, SecretKey, generate
from coterie.crypto.paillier.obfuscators import HolderObfuscators, Mode, Obfuscators, Pool, PublicObfuscators
from coterie.crypto.paillier.packing import Packing
from coterie.crypto.paillier.vector import EncryptedVector, RunningSum, decrypt_vector, encrypt

__all__ = [
    "EncryptedVector",
    "HolderObfuscators",
    "Mode",
    "Obfuscators",
    "Packing",
    "Pool",
    "PublicKey",
    "PublicObfuscators",
    "RunningSum",
    "SecretKey",
    "decrypt_vector",
    "encrypt",
    "from_bytes",
    "generate",
    "to_bytes",
]
