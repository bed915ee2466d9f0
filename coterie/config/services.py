"""Configuration of each service process (``coterie serve ROLE --config FILE``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from coterie.config.base import Address, ConfigModel, Label, LimitSettings, Peer, ServiceSettings
from coterie.crypto.key_record import KeyTerms
from coterie.rounds.consent import Consent

__all__ = [
    "ClientSettings",
    "ConsentSettings",
    "ContributorSettings",
    "CosSettings",
    "DataOwnerSettings",
    "DatabaseSettings",
    "DecryptingClientSettings",
    "KeySettings",
    "OwnerSettings",
    "ThirdPartySettings",
    "settings_model",
]


class ThirdPartySettings(ServiceSettings):
    """Third party: certificate authority and key directory."""

    enrol_listen: Address = Field(description="Address for enrolment, reached without a client certificate.")
    tokens: Path | None = Field(
        None, description="File of token records made by `coterie certs token`; read again when it changes."
    )
    enrol_limits: LimitSettings = Field(
        LimitSettings(
            connections=512,
            connections_per_peer=32,
            calls=128,
            calls_per_peer=32,
            calls_per_s=20.0,
            burst=400,
            uploads_per_peer=32,
            message_s=20.0,
            handshake_s=10.0,
            keepalive_s=30.0,
            idle_s=60.0,
            age_s=600.0,
        ),
        description="As `limits`, for enrolment, where nobody shows a certificate: a caller is an address.",
    )
    certificate_days: float = Field(30.0, gt=0, le=397, description="Validity of issued certificates, days.")


class DatabaseSettings(ConfigModel):
    """A database of PostgreSQL."""

    url: str = Field(
        description="`postgresql+psycopg://USER@HOST:PORT/DATABASE`, without a password. Straight to the server: "
        "a pool that gives each transaction another connection loses the lock that keeps a second service out."
    )
    password_file: Path | None = Field(
        None,
        description="File whose first line is the password. Absent: `PGPASSWORD` or `PGPASSFILE` of the environment "
        "say it, or the server asks for none.",
    )
    tls: Literal["disable", "require", "verify-ca", "verify-full"] = Field(
        "verify-full",
        description="What is asked of the connection, as PostgreSQL's `sslmode`; a Unix socket has no TLS.",
    )
    ca_file: Path | None = Field(
        None, description="Who may sign the server's certificate, PEM; the system's authorities when absent."
    )
    certificate: Path | None = Field(
        None, description="Certificate of the client, where the server asks for one."
    )
    key: Path | None = Field(None, description="The key of `certificate`.")
    timeout_s: float = Field(
        10.0, gt=0, le=600, description="Longest time that a statement may take, seconds."
    )


class CosSettings(ServiceSettings):
    """Central orchestration server."""

    thirdparty: Peer = Field(description="The key directory.")
    database: DatabaseSettings | None = Field(
        None,
        description="Where runs are kept; a file in the state folder when absent. Versions of the model stay there.",
    )
    max_uploads: int = Field(8, ge=1, le=1024, description="Uploads taken at once.")
    max_payload_mb: int = Field(64, ge=1, le=4096, description="Largest submitted item, MiB.")
    snapshot_every: int = Field(
        500, ge=1, description="Updates between two snapshots of the model; the log covers the rest."
    )


class OwnerSettings(ConfigModel):
    """One data owner of a process."""

    name: Label = Field(description="Its name in the catalogue.")
    items: Path = Field(description="CSV with a column `item`: the external keys of its items.")
    features: Path | None = Field(
        None,
        description="CSV with a column `item`, then one for each feature: numbers, nothing where one is missing. What "
        "the owner knows of its items, for systems that ask it.",
    )


class DataOwnerSettings(ServiceSettings):
    """A process that serves one or more data owners."""

    cos: Peer = Field(description="The orchestration server.")
    thirdparty: Peer = Field(description="The key directory.")
    run: Label = Field("run", description="Run to take part in.")
    advertise: Address | None = Field(
        None, description="Address that clients are told; the listening address when absent."
    )
    owners: tuple[OwnerSettings, ...] = Field(min_length=1, description="The data owners served here.")
    leave_after_epoch: int | None = Field(
        None, ge=1, description="Leave the run after this epoch (to study churn)."
    )
    prekey_hours: float = Field(24.0, gt=0, le=24 * 30, description="Validity of a prekey, hours.")


class ConsentSettings(ConfigModel):
    """What a client takes part in; it refuses a run or round outside it, and says why in its receipts."""

    systems: tuple[str, ...] = Field((), description="Learning systems that it accepts; any when empty.")
    secure_sums: tuple[Literal["clear", "masked", "encrypted", "shared-key"], ...] = Field(
        (), description="How contributions may be summed; any way when empty."
    )
    min_cohort: int = Field(20, ge=1, description="Smallest cohort that it accepts.")
    min_sum: int = Field(20, ge=1, description="Smallest number of users over which a sum may be formed.")
    experiment: bool | None = Field(
        None,
        description="Whether floors may count users instead of devices. Absent: where this host itself holds more "
        "than one user, as in an experiment.",
    )
    rounds_per_day: int = Field(
        0, ge=0, description="In how many rounds of a UTC day a user may take part. 0: in any number."
    )
    metrics: tuple[str, ...] | None = Field(
        None, description="Metrics that may leave, inside sums over a cohort; any when absent."
    )
    sparse: bool = Field(
        False,
        description="Whether contributions under a key may leave out ciphertexts without anything in them, which shows "
        "the server near which items there is something.",
    )

    def consent(self, users: int) -> Consent:
        """Return the consent of a host with a number of users."""
        return Consent(
            systems=self.systems,
            secure_sums=self.secure_sums,
            min_cohort=self.min_cohort,
            min_sum=self.min_sum,
            experiment=users > 1 if self.experiment is None else self.experiment,
            rounds_per_day=self.rounds_per_day,
            metrics=self.metrics,
            sparse=self.sparse,
        )


class KeySettings(ConfigModel):
    """What a party relies on about the key of encrypted sums."""

    roster: Path = Field(
        description="Who may hold the secret, signed by the operator (`coterie certs roster`)."
    )
    roster_key: Path = Field(
        description="The operator's public key for rosters (`coterie certs roster-key`); from the operator, never from "
        "a service."
    )
    bits: int = Field(3072, ge=1024, le=8192, multiple_of=16, description="Length of the key's modulus.")
    comparison: bool = Field(
        False,
        description="Whether the run compares with a paper: only then the key may have fewer than 2048 bits.",
    )

    @property
    def terms(self) -> KeyTerms:
        """Terms that a key of encrypted sums has to meet: its length, and whether a short one is allowed."""
        return KeyTerms(bits=self.bits, comparison=self.comparison)


class ContributorSettings(KeySettings):
    """The key under which a client encrypts, in runs with encrypted sums; it may hold it, too."""

    obfuscators: Literal["public", "short"] = Field(
        "public",
        description="How values are hidden: by exponents of half the key's length, or of 512 bits, which assumes more. "
        "Who holds the key itself needs neither.",
    )
    holds_key: bool = Field(
        False,
        description="Whether this host holds the key, as one of those that the roster names: in runs whose "
        "participants share it.",
    )
    rotate_every: int = Field(0, ge=0, description="As of decrypting clients; with holds_key.")


class ClientSettings(ServiceSettings):
    """A client host: one device with one user, or many users for an experiment."""

    cos: Peer = Field(description="The orchestration server.")
    thirdparty: Peer = Field(description="The key directory.")
    run: Label = Field("run", description="Run to take part in.")
    histories: Path | None = Field(
        None,
        description="CSV with columns `user,item,positive,time,part`, taken into the private store once. Part is 0 to "
        "train, 1 to choose a version, 2 to test; 3 names an item that what is held out is ranked among. A column "
        "`rating` holds ratings, for systems that predict them.",
    )
    attributes: Path | None = Field(
        None,
        description="CSV with a column `user`, then one for each attribute in the order of the run's plan: numbers, "
        "nothing where one is missing. A user that has no history takes part without one.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="Seed of the users' own randomness and of the order in which they deliver (experiments). Absent: "
        "randomness of the operating system, kept in the state folder.",
    )
    consent: ConsentSettings = Field(
        default_factory=ConsentSettings, description="What this host takes part in."
    )
    encryption: ContributorSettings | None = Field(
        None,
        description="The key of encrypted sums. Without it this host takes part in no run that encrypts.",
    )
    per_user_metrics: bool = Field(
        False,
        description="Write each user's metrics to `metrics.csv` in the state folder; they never leave it.",
    )


class DecryptingClientSettings(ServiceSettings):
    """A decrypting client: holds the key of encrypted sums with others, and decrypts a part of each sum."""

    cos: Peer = Field(description="The orchestration server.")
    thirdparty: Peer = Field(description="The key directory.")
    run: Label = Field("run", description="Run to take part in.")
    encryption: KeySettings = Field(description="The key.")
    rotate_every: int = Field(
        0,
        ge=0,
        description="Rounds after which another key is made; 0 for never. It is the first holder on the roster that "
        "begins, and the others follow.",
    )
    consent: ConsentSettings = Field(
        default_factory=ConsentSettings, description="Which sums it helps to form."
    )


_MODELS: dict[str, type[ServiceSettings]] = {
    "cos": CosSettings,
    "data-owner": DataOwnerSettings,
    "client": ClientSettings,
    "decrypting-client": DecryptingClientSettings,
    "thirdparty": ThirdPartySettings,
}

Role = Literal["cos", "data-owner", "client", "decrypting-client", "thirdparty"]


def settings_model(role: str) -> type[ServiceSettings]:
    """Return the configuration model of a role."""
    return _MODELS[role]
