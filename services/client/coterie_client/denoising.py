"""Build the denoiser's part of a client host, which takes the noise of other hosts' users out of sums."""

from __future__ import annotations

from coterie.errors import ConfigError
from coterie.parties.denoising import Denoising
from coterie_client.host import Host
from coterie_client.members import HostMembers

__all__ = ["denoising"]

_JOURNAL = "denoiser.json"

_NOISE = "sums of noise"
"""Name on receipts of what a host adds up for others."""


def denoising(host: Host, members: HostMembers) -> Denoising:
    """Build a host's part as a denoiser.

    Parameters
    ----------
    host : Host
        Registered.
    members : HostMembers
        Its users as members of sums, who check the plans.

    Raises
    ------
    ConfigError
        The host knows no key directory.
    """
    directory = host.directory
    if directory is None:
        raise ConfigError("a host without a key directory cannot denoise")

    async def noted(size: int) -> None:
        await host.note_sent("cos", _NOISE, 1, size)

    return Denoising(
        host.party,
        host.runtime.party,
        members.denoises,
        members.slots_of_first,
        directory.bundles,
        host.settings.state / _JOURNAL,
        host.runtime.accounting.activity,
        noted,
        host.writer.files_when_possible,
    )
