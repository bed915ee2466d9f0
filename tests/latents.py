"""Sets of meta-latents for tests: terms, records of Paillier keys, signed records, encrypted vectors."""

import hashlib
import time
from functools import cache

import numpy as np

from coterie.crypto.custody import sign_record
from coterie.crypto.latent_codes import encode_latent
from coterie.crypto.latent_terms import LatentTerms, sign_latent_record
from coterie.crypto.paillier import PublicObfuscators, encrypt, to_bytes

from .custody import held, ids, people

TERMS = LatentTerms(dimension=6, combinations=24, least=24, most=40, bound=4000)
CLOSES = int(time.time()) + 1000
EXPIRY = CLOSES + 1000


def key_record(run="a-run", epoch=1, count=3):
    """Return the record of the Paillier key that `held` has for a run and an epoch, signed by the first holder."""
    holders = people(count)
    return sign_record(holders[0], held(run, epoch), ids(holders))


def signed_set(run="a-run", epoch=1, *, terms=TERMS, closes=CLOSES, expiry=EXPIRY, opener=1):
    """Return the record of a set, that of its Paillier key, and the identities of the key's holders."""
    keys, holders = key_record(run, epoch), people(3)
    return sign_latent_record(holders[opener], keys, terms, closes, expiry), keys, holders


def upload_id(name):
    return hashlib.sha256(name.encode()).digest()


@cache
def _obfuscators(run, epoch):
    return PublicObfuscators(held(run, epoch).public)


def ciphertext(latent, run="a-run", epoch=1, terms=TERMS):
    """Return a latent vector as a key user encrypts it."""
    source = _obfuscators(run, epoch)
    packing, codes = terms.packing(source.public.bits), encode_latent(np.asarray(latent, float), terms)
    return to_bytes(encrypt(codes, packing, source))
