"""How often members of pseudo meta-latents are named by somebody who reads them and knows all candidates.

Run as ``python -m coterie.studies.latent_members FILE``: ``FILE`` holds an array ``latents`` (users, d) of key users'
latent vectors (``numpy.savez``).  Combinations are drawn as the third party draws them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.latent_codes import encode_latent, latents_of_sums
from coterie.crypto.latent_terms import LatentTerms
from coterie.crypto.latent_weights import draw_combinations
from coterie.privacy.attacks.latent_members import guess_members, share_named

__all__ = ["main", "named"]

_COUNT = 100
_MEMBERS = (1, 3, 5, 10)


def named(latents: NDArray[np.float64], members: int, count: int = _COUNT) -> float:
    """Return the share of members that the attack names; with one member, of plain vectors.

    Parameters
    ----------
    latents : ndarray of float64, shape (n, d)
    members, count : int
        At most as many combinations as there are users.
    """
    n, d = latents.shape
    count = min(count, n)
    bound = max(1, int(np.ceil(1000 * np.abs(latents).max())))
    terms = LatentTerms(dimension=d, combinations=count, least=n, most=n, bound=bound)
    codes = np.array([encode_latent(row, terms) for row in latents], np.int64)
    if members == 1:
        truth = np.arange(count)[:, None]
        return share_named(guess_members(latents_of_sums(codes[:count] << 16, terms), latents, 1), truth)
    drawn = draw_combinations(n, members, count)
    sums = np.array([np.array(one.weights) @ codes[list(one.members)] for one in drawn])
    truth = np.array([one.members for one in drawn], np.intp)
    return share_named(guess_members(latents_of_sums(sums, terms), latents, members), truth)


def main(arguments: list[str] | None = None) -> int:
    """Print the shares as JSON, by number of members, with that of chance."""
    parser = argparse.ArgumentParser(prog="python -m coterie.studies.latent_members", description=__doc__)
    parser.add_argument("file", type=Path)
    latents = np.load(parser.parse_args(arguments).file)["latents"].astype(np.float64)
    shares = {m: {"named": named(latents, m), "chance": m / len(latents)} for m in _MEMBERS}
    print(json.dumps({"key users": len(latents), "dimension": latents.shape[1], "members": shares}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
