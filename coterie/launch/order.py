"""Orders: the file that ``coterie bootstrap`` writes for the operator of a federation across machines.

An order holds the run's settings and the facts about the data that an operator may know: name and size, the digest of
the split, and the mean metrics of the reference rows.  It holds no interaction.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.json_format import ParseDict

from coterie.config.run import RunSettings
from coterie.crypto.keyfile import write_private_file
from coterie.errors import ConfigError, PreflightError
from coterie.launch.parties import start_request
from coterie.studies.reference import Reference
from coterie.studies.run_plan import run_plan
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import Holding, RunPlan

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """One run, ready for an operator to start.

    Parameters
    ----------
    run_id : str
        Id of the run, which the configuration of every party names.
    seed : int
        Seed of the learning.
    settings : RunSettings
        The run.
    owners, users : int
        How many data owners and users the COS waits for.
    dataset : dict
        Name and size of the data set.
    split_sha256 : str
        Digest of the split.
    reference : dict
        Reference rows by name; empty when the run wants none.
    protection : dict
        The report's section on what the run's sums protect; empty for asynchronous runs, which have no sums.
    attributes : list of str
        Names of the users' attributes, for systems that learn from them.
    holdings : list of dict
        Which data owner holds which items: messages ``Holding`` in JSON's form.
    """

    run_id: str
    seed: int
    settings: RunSettings
    owners: int
    users: int
    dataset: dict[str, Any]
    split_sha256: str
    reference: dict[str, Reference]
    protection: dict[str, Any] = field(default_factory=dict)
    attributes: list[str] = field(default_factory=list)
    holdings: list[dict[str, Any]] = field(default_factory=list)

    def plan(self) -> RunPlan:
        """Return the plan of the run."""
        return run_plan(
            self.settings,
            run_id=self.run_id,
            seed=self.seed,
            attributes=self.attributes,
            holdings=[ParseDict(one, Holding()) for one in self.holdings],
        )

    def request(self, key: Ed25519PrivateKey) -> wire.StartRunRequest:
        """Return the request by which the operator starts the run at the COS, signed with the operator's key."""
        return start_request(self.settings, self.plan(), key, owners=self.owners, users=self.users)

    def save(self, path: Path) -> None:
        """Write the order as JSON, atomically and with mode 0600."""
        fields = {
            **vars(self),
            "settings": self.settings.model_dump(mode="json", exclude_none=True),
            "reference": {name: dataclasses.asdict(row) for name, row in self.reference.items()},
        }
        write_private_file(path, json.dumps(fields, indent=1).encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an order that `save` wrote.

        Raises
        ------
        PreflightError
            The file cannot be read.
        ConfigError
            The file is no order of this version.
        """
        try:
            fields = json.loads(path.read_text())
            rows = {name: Reference(**row) for name, row in fields.pop("reference").items()}
            settings = RunSettings.model_validate(fields.pop("settings"))
            return cls(**fields, settings=settings, reference=rows)
        except OSError as error:
            raise PreflightError(
                f"cannot read the order {path}: {error.strerror}", hint="`coterie bootstrap` writes it"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no order of this version: {error}", hint="write it again with `coterie bootstrap`"
            ) from error
