"""A run over services beside the same run in one process."""

import asyncio

from coterie.studies.in_process import train_in_process

_SAME = ("epoch", "version", "users", "metrics")


def assert_equal_to_one_process(settings, federation):
    """Run services to the end and assert that a run in clear in one process comes to equal numbers.

    Returns the COS's report of the run over services.
    """

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            return running.feed, await running.finish()

    feed, report = asyncio.run(to_the_end())
    clear = settings.model_copy(update={"secure_sum": "clear"})
    alone = train_in_process(clear, feed, run_id="test", seed=0, see=lambda event: None).known
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert [{key: one[key] for key in _SAME} for one in report["history"]] == [
        {key: one[key] for key in _SAME} for one in alone["history"]
    ]
    assert report["chosen"] == alone["chosen"]
    assert report["closed_share"] == alone["closed_share"]
    return report
