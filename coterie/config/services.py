"""Configuration of each service process (``coterie serve ROLE --config FILE``)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from coterie.config.base import Address, ConfigModel, CosPeer, Label, LimitSettings, Peer, ServiceSettings
from coterie.crypto.operator_key import OperatorKeys

if TYPE_CHECKING:
    from coterie.crypto.key_record import KeyTerms
    from coterie.rounds.consent import Consent, OwnerConsent

__all__ = [
    "ClientSettings",
    "ConsentSettings",
    "ContributorSettings",
    "CosSettings",
    "DataOwnerSettings",
    "DatabaseSettings",
    "DecryptingClientSettings",
    "KeySettings",
    "ObjectSettings",
    "OidcSettings",
    "OwnerConsentSettings",
    "OwnerSettings",
    "PartySettings",
    "ThirdPartySettings",
    "settings_model",
]


def _operator_key(text: str) -> str:
    OperatorKeys.parse([text])
    return text


OperatorKey = Annotated[str, AfterValidator(_operator_key)]
"""An operator's public key, 64 hexadecimal digits."""


def _https(text: str) -> str:
    wrong = f"{text[:80]!r} is no address that is taken, expected https://HOST/PATH without a user"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(wrong) from None
    if parts.scheme != "https" or not parts.hostname or port == 0 or re.search(r"[\s@#]", text):
        raise ValueError(wrong)
    return text


HttpsAddress = Annotated[str, AfterValidator(_https)]
"""Address of a page over HTTPS."""


class DatabaseSettings(ConfigModel):
    """A PostgreSQL database in which a service keeps its state."""

    url: str = Field(
        description="Address of the database, `postgresql+psycopg://USER@HOST:PORT/DATABASE`, without a "
        "password. Connect to the server itself: a pool that changes connections between "
        "transactions loses the lock that keeps a second service out."
    )
    password_file: Path | None = Field(
        None,
        description="File whose first line is the password. When absent, `PGPASSWORD` or `PGPASSFILE` of the "
        "environment is used, or no password.",
    )
    tls: Literal["disable", "require", "verify-ca", "verify-full"] = Field(
        "verify-full",
        description="How TLS to the database is required and verified, as PostgreSQL's `sslmode`. A Unix socket "
        "has no TLS.",
    )
    ca_file: Path | None = Field(
        None,
        description="File with the authorities that may sign the database server's certificate (PEM). When "
        "absent, those of the operating system.",
    )
    certificate: Path | None = Field(
        None, description="File with the client certificate, for database servers that ask for one."
    )
    key: Path | None = Field(None, description="File with the private key of `certificate`.")
    timeout_s: float = Field(10.0, gt=0, le=600, description="Longest duration of a statement, seconds.")


class ObjectSettings(ConfigModel):
    """A store of objects, such as S3 or a folder that machines share."""

    url: str = Field(
        description="Address of a folder in the store, `PROTOCOL://PLACE/FOLDER` with a protocol of fsspec, such as "
        "`s3://BUCKET/FOLDER`, or `file:///FOLDER` for a folder, made before, of a file system that all machines "
        "share. It holds no password."
    )
    options_file: Path | None = Field(
        None,
        description="JSON file of mode 0600 with options of the protocol's implementation, such as an endpoint or "
        "keys. When absent, they are taken from where the implementation finds them, such as the environment.",
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Longest duration of one call, as of the writing of a model, seconds.",
    )


class OidcSettings(ConfigModel):
    """Issuer whose ID tokens (OpenID Connect) enrol client hosts in the place of enrolment tokens."""

    issuer: HttpsAddress = Field(
        max_length=255,
        description="Address of the issuer, exactly as the claim `iss` of its tokens says.",
    )
    audience: str = Field(
        min_length=1,
        max_length=255,
        description="Audience that a token must be made for, in the claim `aud`.",
    )
    jwks_url: HttpsAddress | None = Field(
        None,
        description="Address of the issuer's keys (JWKS). They are fetched when the first token comes, once an "
        "hour, and for an unknown key at most once a minute; redirects and proxies are not followed.",
    )
    jwks_file: Path | None = Field(
        None,
        description="File with the issuer's keys (JWKS), in the place of `jwks_url`; read for each token.",
    )
    jwks_ca_file: Path | None = Field(
        None,
        description="Authority of the server of `jwks_url`, PEM. When absent, those of the system are trusted.",
    )
    subject_claim: str = Field(
        "sub",
        min_length=1,
        description="Claim that names the party. Choose none that an issuer gives to another person later, as "
        "addresses of mail.",
    )
    claims: dict[str, str | bool] = Field(
        {},
        description="Claims that a token must carry, with their values; a claim that is a list must contain the value.",
    )
    devices: int = Field(
        1, ge=1, le=99, description="Most devices of one subject, each with a name, a key and a state folder."
    )
    participants: int = Field(
        1, ge=1, le=1000, description="Most participants (users) that one device may speak for."
    )
    leeway_s: int = Field(
        60,
        ge=0,
        le=600,
        description="Difference between the issuer's clock and this machine's that tokens are taken with, seconds.",
    )

    @model_validator(mode="after")
    def _one_place_of_keys(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("oidc needs either jwks_url or jwks_file")
        if self.jwks_ca_file is not None and self.jwks_url is None:
            raise ValueError("oidc.jwks_ca_file goes with jwks_url")
        return self


class ThirdPartySettings(ServiceSettings):
    """Third party: certificate authority and key directory."""

    enrol_listen: Address = Field(
        description="Address at which enrolments are taken, without a client certificate, `host:port`."
    )
    tokens: Path | None = Field(
        None,
        description="File with the records of tokens that `coterie certs token` made; read again when it "
        "changes. When absent, it is in the state folder.",
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
        description="Limits at the address for enrolment, where a caller is known by its network address. When "
        "the table is absent, stricter values hold than the defaults of its keys: 512 connections, "
        "128 calls, 20 calls per second of one caller.",
    )
    certificate_days: float = Field(
        30.0,
        gt=0,
        le=397,
        description="Validity of the certificates that the third party issues, days. Parties renew theirs before "
        "it ends.",
    )
    late_renewal_days: float = Field(
        180.0,
        ge=0,
        le=3650,
        description="Time after the end of its certificate in which a client host renews it by a signature with the "
        "certificate's key, days; later it needs a new token. 0: no expired certificate is renewed.",
    )
    oidc: OidcSettings | None = Field(
        None,
        description="Issuer whose ID tokens enrol client hosts (docs/oidc.md). When absent, none does.",
    )
    expansion_database: DatabaseSettings | None = Field(
        None,
        description="PostgreSQL database for the tags and sealed embeddings of graph expansion, not the one of the "
        "COS. When absent, they are in a SQLite file of the state folder.",
    )
    latent_seed: int | None = Field(
        None,
        ge=0,
        description="Seed of the members and weights of pseudo meta-latents, for experiments that are to be repeated: "
        "whoever has it knows them. When absent, the operating system's randomness is used.",
    )


class CosSettings(ServiceSettings):
    """The orchestration server (COS), which sums contributions and keeps the model."""

    thirdparty: Peer = Field(description="The third party, which holds the key directory.")
    database: DatabaseSettings | None = Field(
        None,
        description="PostgreSQL database for runs. When absent, they are in a SQLite file in the state folder. "
        "Versions of the model are in the state folder in either case, unless `standby` is set.",
    )
    standby: bool = Field(
        False,
        description="Whether this COS takes turns with others that have the same name, the same `database` and this "
        "key set: one of them serves, the others wait and take its runs over when it is gone. Versions of the model "
        "are then in the database.",
    )
    objects: ObjectSettings | None = Field(
        None,
        description="Store of objects for versions of the model, which are then not in the database; needs `standby`.",
    )
    part: Literal["both", "intake", "coordinator"] = Field(
        "both",
        description="Part of the COS that this process does: `both`; `intake`, which holds the connections of parties, "
        "takes their contributions and hands other calls on; or `coordinator`, which keeps the runs and takes calls "
        "from intakes. The option `--part` of `coterie serve cos` says the same.",
    )
    coordinator: tuple[Address, ...] = Field(
        (),
        description="Addresses of the coordinator and of its standbys, `host:port`, for an intake. They have the name "
        "of this COS in their certificates.",
    )
    max_uploads: int = Field(8, ge=1, le=1024, description="Most uploads that are received at the same time.")
    max_payload_mb: int = Field(64, ge=1, le=4096, description="Largest payload of one submitted item, MiB.")
    snapshot_every: int = Field(
        500,
        ge=1,
        description="Updates of the model between two snapshots. A restart begins with the last one and applies "
        "the logged updates after it.",
    )

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if self.standby and self.database is None:
            raise ValueError(
                "standby needs a [database] that both COS can reach, and there is none: the file cos.db belongs to one "
                "process; add [database] with the URL of a PostgreSQL database, or leave standby out"
            )
        if self.objects is not None and not self.standby:
            raise ValueError(
                "[objects] is for versions of the model that a standby has to find, and this COS has none: add "
                "standby = true, which a COS may also set that has no other one beside it, or leave [objects] out"
            )
        if self.part != "both" and self.database is None:
            raise ValueError(
                f"the part {self.part!r} needs a [database] that intakes and coordinator can reach, and there is none; "
                "add [database] with the URL of a PostgreSQL database, or leave part out"
            )
        if self.part == "intake" and self.standby:
            raise ValueError(
                "an intake has no standby: start as many as you like beside it, and leave standby out"
            )
        if (self.part == "intake") != bool(self.coordinator):
            raise ValueError(
                'coordinator names where an intake finds the runs: give it with part = "intake", and with no '
                "other part"
            )
        return self

    def private_files(self) -> list[Path]:
        """Return the file with options of the store of objects, which may have keys."""
        held = None if self.objects is None else self.objects.options_file
        return [] if held is None else [held]


class PartySettings(ServiceSettings):
    """A party of a run: a data owner's process, a client host or a decrypting client."""

    cos: CosPeer = Field(description="The orchestration server.")
    thirdparty: Peer = Field(description="The third party, which holds the key directory.")
    run: Label = Field("run", description="Id of the run to take part in.")
    operator_keys: tuple[OperatorKey, ...] = Field(
        min_length=1,
        description="Public keys of the operators whose runs this party accepts, 64 hexadecimal digits each. It takes "
        "part in no run whose plan none of them signed. `coterie bootstrap` writes its own key here. A key must come "
        "from the operator, never from a service.",
    )

    @property
    def operators(self) -> OperatorKeys:
        """The operators whose runs this party accepts."""
        return OperatorKeys.parse(self.operator_keys)


class OwnerSettings(ConfigModel):
    """A data owner that a process serves."""

    name: Label = Field(description="Name of the data owner in the catalogue.")
    items: Path = Field(
        description="CSV file with a column `item`: the keys of the owner's items, as in the data set."
    )
    features: Path | None = Field(
        None,
        description="CSV file with a column `item` and a numeric column for each feature, empty where unknown. "
        "For systems that learn from features of items.",
    )


class OwnerConsentSettings(ConfigModel):
    """Terms under which data owners take part; they leave other runs, and the log of their process says why."""

    systems: tuple[str, ...] = Field(
        (), description="Names of the learning systems that the owners accept; any when empty."
    )
    secure_sums: tuple[Literal["clear", "denoised", "masked", "encrypted", "shared-key"], ...] = Field(
        (), description="Secure sums that the owners accept; any when empty."
    )
    k_min: int = Field(
        5,
        ge=1,
        le=10_000,
        description="Least number of distinct users behind a row that leaves an owner, for runs in which owners hold "
        "rows back (DRIFT's shielded form): a run with a lower `k_min` is refused.",
    )
    experiment: bool = Field(
        False, description="Whether floors of the run may count users instead of devices."
    )

    def consent(self) -> OwnerConsent:
        """Return the owners' consent."""
        from coterie.rounds.consent import OwnerConsent  # heavy (NumPy)

        return OwnerConsent(self.systems, self.secure_sums, self.k_min, self.experiment)


class DataOwnerSettings(PartySettings):
    """A process that serves one or more data owners."""

    advertise: Address | None = Field(
        None, description="Address that clients are told to send to, `host:port`. When absent, `listen`."
    )
    owners: tuple[OwnerSettings, ...] = Field(
        min_length=1, description="Data owners that this process serves."
    )
    leave_after_epoch: int | None = Field(
        None,
        ge=1,
        description="Epoch after which the process leaves the run, to study churn. When absent, it stays.",
    )
    prekey_hours: float = Field(
        24.0,
        gt=0,
        le=24 * 30,
        description="Validity of a prekey, the public key for which clients seal records, hours. It is renewed "
        "at half of it.",
    )
    consent: OwnerConsentSettings = Field(
        default_factory=OwnerConsentSettings,
        description="Terms under which this process's owners take part in runs.",
    )

    def private_files(self) -> list[Path]:
        """Return the files with features of items, which no other party gets."""
        return [owner.features for owner in self.owners if owner.features is not None]


class ConsentSettings(ConfigModel):
    """Terms under which a client takes part; it refuses other runs and rounds, and says why in its receipts."""

    systems: tuple[str, ...] = Field(
        (), description="Names of the learning systems that it accepts; any when empty."
    )
    secure_sums: tuple[Literal["clear", "denoised", "masked", "encrypted", "shared-key"], ...] = Field(
        (), description="Secure sums that it accepts for contributions; any when empty."
    )
    min_cohort: int = Field(
        20,
        ge=1,
        description="Smallest cohort that it accepts, in devices, or in users where `experiment` holds.",
    )
    min_sum: int = Field(
        20,
        ge=1,
        description="Smallest number of devices, or users where `experiment` holds, over which a sum may be "
        "formed.",
    )
    experiment: bool | None = Field(
        None,
        description="Whether `min_cohort` and `min_sum` may count users instead of devices. When absent, they "
        "may if this host holds more than one user.",
    )
    rounds_per_day: int = Field(
        0, ge=0, description="Most rounds of a UTC day in which a user takes part; 0: any number."
    )
    metrics: tuple[str, ...] | None = Field(
        None, description="Metrics that may leave, inside sums over a cohort; any when absent."
    )
    sparse: bool = Field(
        False,
        description="Whether encrypted contributions may leave out ciphertexts that hold only zeros, which shows "
        "the server near which items a user has something.",
    )

    max_epsilon: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Most epsilon of differential privacy that a run may cost a user, over all its sums; runs without "
        "noise are refused, too. 0: any.",
    )

    def consent(self, users: int) -> Consent:
        """Return the consent of a host with a number of users."""
        from coterie.rounds.consent import Consent  # heavy (NumPy)

        return Consent(
            systems=self.systems,
            secure_sums=self.secure_sums,
            min_cohort=self.min_cohort,
            min_sum=self.min_sum,
            experiment=users > 1 if self.experiment is None else self.experiment,
            rounds_per_day=self.rounds_per_day,
            metrics=self.metrics,
            sparse=self.sparse,
            max_epsilon=self.max_epsilon,
        )


class KeySettings(ConfigModel):
    """The roster and the terms by which a party checks the key of encrypted sums."""

    roster: Path = Field(
        description="File with the roster: the participants who may hold the secret key, signed by the operator "
        "(`coterie certs roster`)."
    )
    roster_key: Path = Field(
        description="File with the operator's public key for rosters (`coterie certs roster-key`). It must come "
        "from the operator, never from a service."
    )
    bits: int = Field(
        3072, ge=1024, le=8192, multiple_of=16, description="Length of the Paillier key's modulus, bits."
    )
    comparison: bool = Field(
        False,
        description="Whether a key of fewer than 2048 bits is accepted, to compare with a paper. Such a key "
        "protects nobody.",
    )

    @property
    def terms(self) -> KeyTerms:
        """Terms that a key of encrypted sums has to meet: its length, and whether a short one is allowed."""
        from coterie.crypto.key_record import KeyTerms

        return KeyTerms(bits=self.bits, comparison=self.comparison)


class ContributorSettings(KeySettings):
    """The key under which a client encrypts, in runs with encrypted sums; it may hold it, too."""

    obfuscators: Literal["public", "short"] = Field(
        "public",
        description="Length of the random exponents that hide values. public: half of the key's length. short: "
        "512 bits, which is faster and assumes more. A holder of the key needs neither.",
    )
    holds_key: bool = Field(
        False,
        description="Whether this host holds the secret key, in runs whose participants share it. The roster "
        "must name it.",
    )
    rotate_every: int = Field(
        0,
        ge=0,
        description="Rounds after which the holders replace the key, where `holds_key` is set; 0: never.",
    )


class GraphSettings(ConfigModel):
    """The roster by which a client host checks graph keys of a run whose users find anonymous neighbours."""

    roster: Path = Field(
        description="File with the roster: the client hosts that may hold graph keys, signed by the operator "
        "(`coterie certs roster --purpose graph`)."
    )
    roster_key: Path = Field(
        description="File with the operator's public key for rosters (`coterie certs roster-key`). It must come "
        "from the operator, never from a service."
    )


class ClientSettings(PartySettings):
    """A client host: one device with one user, or many users for an experiment."""

    histories: Path | None = Field(
        None,
        description="CSV file with columns `user,item,positive,time,part`, and `rating` for systems that predict "
        "ratings; taken into the private store once. `part` is 0 to train, 1 to choose a version, 2 "
        "to test, and 3 for an item among which held-out ones are ranked.",
    )
    attributes: Path | None = Field(
        None,
        description="CSV file with a column `user` and a numeric column for each attribute, in the order of the "
        "run's plan, empty where unknown. A user without a history takes part, too.",
    )
    preferences: Path | None = Field(
        None,
        description="CSV file with a column `user` and a numeric column for each preference of the run's system, empty "
        "where a user has set none; taken into the private store once, with the histories. Later changes are made by "
        "calls.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="Seed of the users' randomness and of the order of delivery, for experiments. When absent, "
        "the operating system's randomness is used and kept in the state folder.",
    )
    consent: ConsentSettings = Field(
        default_factory=ConsentSettings,
        description="Terms under which this host takes part in runs and rounds.",
    )
    encryption: ContributorSettings | None = Field(
        None,
        description="The Paillier key of encrypted sums. When absent, this host takes part in no run that "
        "encrypts.",
    )
    expansion: GraphSettings | None = Field(
        None,
        description="Graph expansion, in runs whose users find anonymous neighbours. When absent, this host's users "
        "publish nothing and have no neighbours.",
    )
    latents: KeySettings | None = Field(
        None,
        description="The Paillier key that this host holds with others, in runs whose users learn from pseudo "
        "meta-latents. When absent, its users publish no vectors and learn from none.",
    )
    check_in: bool = Field(
        False,
        description="Whether this host, a person's device, holds no connection while nothing is asked of it: it checks "
        "in with the COS, which says when to come back. In runs in rounds whose `federation.check_in_s` is above 0; "
        "in others polls are held.",
    )
    per_user_metrics: bool = Field(
        False,
        description="Whether each user's metrics are written to `metrics.csv` in the state folder. They never "
        "leave it.",
    )

    def private_files(self) -> list[Path]:
        """Return the files with users' histories, attributes and preferences."""
        return [path for path in (self.histories, self.attributes, self.preferences) if path is not None]


class DecryptingClientSettings(PartySettings):
    """A decrypting client, which holds the key of encrypted sums with others and decrypts a part of each sum."""

    encryption: KeySettings = Field(description="The Paillier key that it holds.")
    rotate_every: int = Field(
        0,
        ge=0,
        description="Rounds after which the key is replaced; 0: never. The first holder on the roster makes the "
        "new key, and the others take it over.",
    )
    consent: ConsentSettings = Field(
        default_factory=ConsentSettings, description="Terms under which it helps to form sums."
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
