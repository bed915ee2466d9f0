"""Who denoises for whom, and noise as it is sealed (docs/spec/denoised-sum.md)."""

from .explicit import digest, encode
from .primitives import gcm_seal, hkdf, x25519


def ring_and_groups(run_plan, beacon, members, floor):
    """Return the members whose keys denoisers have, in ring order, and the group of each (id, device) of one user."""
    seed = digest("denoisers", run_plan, beacon)
    devices = [device for _, device in members]
    order = sorted(set(devices), key=lambda device: digest("denoiser", seed, device.encode()))
    size = min(max(len(members) // (2 * floor), 3), len(order))
    ring = order[:size]
    groups = [None] * len(members)
    for member in sorted(range(len(members)), key=lambda one: digest("denoised", seed, members[one][0])):
        allowed = [
            group
            for group in range(size)
            if devices[member] not in (ring[(group + 1) % size], ring[(group + 2) % size])
        ]
        groups[member] = min(allowed, key=lambda group: (groups.count(group), group))
    return [devices.index(device) for device in ring], groups


def pack(noise, room):
    """Return noise as it is sealed, with room for so many steps."""
    bits = bytearray(-(-len(noise) // 8))
    for place, step in enumerate(noise):
        if step:
            bits[place // 8] |= 1 << place % 8
    steps = [step for step in noise if step]
    steps += [0] * (room - len(steps))
    return bytes(bits) + b"".join(step.to_bytes(4, "little", signed=True) for step in steps)


def seal(secret, public, participants, plan_hash, salt, packed):
    """Return noise sealed by a member for a denoiser."""
    about = encode("noise", plan_hash, *participants)
    return salt + gcm_seal(hkdf(x25519(secret, public), about, salt), bytes(12), packed, about)
