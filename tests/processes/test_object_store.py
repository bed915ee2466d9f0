"""A COS and its standby with versions of the model in a store of objects, which is full, slow, away and loses one."""

import contextlib
import json
import time

import pytest
import sqlalchemy as sa

from coterie.store.cos import model_objects, model_versions, runs
from coterie.store.postgres import DatabaseAddress

from .. import postgres
from ..object_stores import SECRET, set_faults
from . import objects_cos
from .programs import ProgramChild
from .test_fedncf_faults import feed_of
from .test_standby import FIRST, SECOND, Doubled, settings_of_a_run

PASSES = 16


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class DoubledWithObjects(Doubled):
    """A federation whose COS has a standby and a store of objects."""

    def _configure(self):
        laid = super()._configure()
        self.bucket = self.folder / "bucket"
        (self.bucket / "models").mkdir(parents=True)
        options = self.folder / "options.json"
        options.write_text(json.dumps({"key": SECRET}))
        options.chmod(0o600)
        keys = f'url = "faulty://{self.bucket}/models"\noptions_file = "{options}"\ntimeout_s = 20.0\n'
        for party in (FIRST, SECOND):
            child = self.children[party]
            made = ProgramChild(child.role, child.name, child.folder, program=(objects_cos.__name__,))
            self.children[party] = made
            self._late = [made if one is child else one for one in self._late]
            config = made.folder / "config.toml"
            config.write_text(f"{config.read_text()}\n[objects]\n{keys}")
        return laid

    def rows(self, *columns):
        """Return rows of the database."""
        engine = DatabaseAddress(**self.database).engine()
        try:
            with engine.connect() as connection:
                return connection.execute(sa.select(*columns)).all()
        finally:
            engine.dispose()

    def objects(self):
        """Return the names of the objects in the store."""
        below = self.bucket / "models"
        return {str(path.relative_to(below)) for path in below.rglob("*") if path.is_file()}

    async def answers(self):
        """Check that the COS answers the operator while something else waits."""
        since = time.monotonic()
        await self.run_state()
        return time.monotonic() - since


@pytest.mark.long
async def test_versions_in_a_store_of_objects_outlive_a_take_over_and_faults_of_the_store(
    small, server, tmp_path
):
    settings = settings_of_a_run(small)
    rounds = settings.rounds.model_copy(update={"passes": PASSES})
    settings = settings.model_copy(update={"rounds": rounds})
    keys = server.keys(server.database(), timeout_s=5.0)
    async with DoubledWithObjects(
        settings, feed_of(settings), tmp_path / "federation", database=keys
    ) as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")

        # A store that takes nothing: the run waits, and the COS serves.
        set_faults(running.bucket, full=True)
        await running.waits("the store of objects", "No space left on device")
        await running.answers()
        assert await running.health(FIRST) == "SERVING"
        set_faults(running.bucket)
        await running.a_round("a round once there is room", summed=30, dropped=0, reason="")

        # The standby finds the model there, also where each read takes its time.
        set_faults(running.bucket, slow_s=1.0, calls=["read"])
        running.children[FIRST].kill()
        await running.serves(SECOND, time.monotonic())
        await running.a_round("a round of the standby", summed=30, dropped=0, reason="")
        set_faults(running.bucket)

        # An object that is lost is named by whichever COS needs it; put back, the run goes on.
        running.children[SECOND].kill()
        (run,) = running.rows(runs.c.snapshot)
        held = running.rows(model_objects.c.name, model_objects.c.round)
        (present,) = (row for row in held if row.round == run.snapshot)
        path = running.bucket / "models" / present.name
        lost = path.rename(tmp_path / "lost")
        running.children[FIRST].start()
        await running.comes_true(
            lambda: running.children[FIRST].process.poll() is not None, "a COS without its model ends"
        )
        assert running.children[FIRST].process.poll() == 40
        said = running.children[FIRST].log.read_text()
        assert f"/models/{present.name} is lost" in said
        assert "put it back from a copy" in said
        lost.rename(path)
        running.children[FIRST].start()
        await running.a_round("a round after the object was put back", summed=30, dropped=0, reason="")
        report = await running.finish()
        assert (report["phase"], report["reason"], report["version"]) == ("done", "", PASSES)
        trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
        assert [one["version"] for one in trained] == list(range(1, PASSES + 1))
        assert not running.rows(model_versions.c.run_id)
        named = {row.name for row in running.rows(model_objects.c.name)}
        assert named <= running.objects()
    for party in (FIRST, SECOND):
        with contextlib.suppress(FileNotFoundError):
            assert SECRET not in running.children[party].log.read_text()
