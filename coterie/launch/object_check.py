"""Verify the versions of models that a COS has in a store of objects, against the rows of its database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from coterie.config.services import CosSettings
from coterie.errors import ConfigError, StoreError
from coterie.launch.finding import Finding, failed, passed
from coterie.store.cos import model_objects, object_folder
from coterie.store.engine import failure
from coterie.store.objects import ObjectAddress
from coterie.store.postgres import DatabaseAddress
from coterie.store.version_objects import (
    ORPHANS_AFTER_S,
    NamedVersion,
    VersionObjects,
    all_objects,
    named_objects,
    needed_objects,
)

__all__ = ["check_objects"]

Reading = Callable[[Callable[[sa.Connection], Any]], Any]
"""Runs a piece of work that reads the database, and returns its result."""

_CHECK = "objects"
_HOURS = int(ORPHANS_AFTER_S / 3600)


def check_objects(settings: CosSettings, *, repair: bool = False) -> list[Finding]:
    """Verify all objects that rows name, and look for objects that none names; a COS may run meanwhile.

    Parameters
    ----------
    settings : CosSettings
    repair : bool
        Whether old objects that no row names are removed.

    Raises
    ------
    ConfigError
        The configuration names no store of objects, or one that cannot be used.
    StoreError
        The database cannot be read.
    """
    if settings.objects is None or settings.database is None:
        raise ConfigError(
            "the configuration names no store of objects",
            hint="name that of a COS with [objects], or leave it out",
        )
    objects = VersionObjects(ObjectAddress(**settings.objects.model_dump()).open())
    engine = DatabaseAddress(**settings.database.model_dump()).engine()

    def read(work: Callable[[sa.Connection], Any]) -> Any:
        try:
            with engine.connect() as connection:
                return work(connection)
        except sa.exc.DBAPIError as error:
            raise failure(error) from error

    try:
        return asyncio.run(_checked(objects, read, repair=repair))
    finally:
        engine.dispose()


async def _checked(objects: VersionObjects, read: Reading, *, repair: bool) -> list[Finding]:
    if not read(lambda connection: sa.inspect(connection).has_table(model_objects.name)):
        return [passed(_CHECK, "the COS has not been in office with this store yet")]
    present = {one.stored.name for one in read(needed_objects)}
    found, whole = list[Finding](), 0
    for one in read(all_objects):
        try:
            await objects.get(one.stored)
        except StoreError as error:
            if one.stored.name not in read(named_objects):
                # A COS that runs has removed it meanwhile.
                continue
            found.append(_finding(one, error, needed=one.stored.name in present))
            if error.trouble:
                return found
        else:
            whole += 1
    try:
        found += await _left(objects, read, repair=repair)
    except StoreError as error:
        found.append(failed(_CHECK, error, "let the credentials of [objects] allow to list and remove"))
    return [*found, passed(_CHECK, f"{whole} versions of models, each as its row says")]


def _finding(one: NamedVersion, error: StoreError, *, needed: bool) -> Finding:
    said = f"version {one.version} of the model of run {one.run_id}: {error.message}"
    if needed or error.trouble:
        return Finding(_CHECK, "fail", said, error.hint or "look at the store, and check again")
    return Finding(
        _CHECK, "warn", said, f"nothing, as a newer one is there; to have it served again, {error.hint}"
    )


async def _left(objects: VersionObjects, read: Reading, *, repair: bool) -> list[Finding]:
    folder = read(lambda connection: connection.execute(sa.select(object_folder.c.name)).scalar())
    if folder is None:
        return []

    async def named() -> set[str]:
        found: set[str] = read(named_objects)
        return found

    left = await objects.orphans(named, str(folder))
    if not left:
        return []
    said = f"{len(left)} objects of more than {_HOURS} hours that no row names, such as {left[0]}"
    if not repair:
        return [
            Finding(_CHECK, "warn", said, "nothing: the next COS in office removes them, or --repair does")
        ]
    for name in left:
        await objects.store.remove(name)
    return [Finding(_CHECK, "warn", f"{said}; they were removed", "nothing")]
