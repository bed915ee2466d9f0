"""A rounds-based system in one file: an item scores by how many users have it.  docs/extending.md explains it."""

import numpy as np

from coterie.evaluation.leave_one_out import metric_names
from coterie.rounds.training import Purpose, means
from coterie.secure_sum.contribution import Contribution, Layout, Segment
from coterie.systems.registry import SYSTEMS, Offered
from coterie.systems.shared.metric_segments import add_measures, measure_segments, measured_in


class Server:
    asks_supports, metrics, figures = False, metric_names(everything=False), staticmethod(means)

    def __init__(self, settings, n_items, seed, groups):
        self.n_items = n_items

    def layout(self, purpose):  # of a user, each value at most 1
        counts = Segment.whole("counts", (self.n_items,), 1)
        return Layout((counts,) if purpose is Purpose.TRAIN else measure_segments(self.metrics))

    def initial(self):
        return {"counts": np.zeros(self.n_items)}

    def apply(self, arrays, summed):
        return {"counts": arrays["counts"] + summed.sums.get("counts", 0)}  # an evaluation has none

    def model(self, arrays):
        return {"counts": arrays["counts"].astype(np.float32)}

    def opened(self, arrays):
        return None

    def measured(self, purpose, sums):
        return measured_in(sums, self.metrics)


class Host:
    def __init__(self, settings, data, keys, seed, keep):
        self.holdout, self.rng = data.leave_one_out(seed), np.random.default_rng(seed)
        self.items, self.layout = self.holdout.training(), Server(settings, len(data.items), seed, 0).layout

    def contributions(self, plan, model, opened, members):
        self.measured = self.holdout.measure(lambda users, items: model["counts"][items])  # stays here
        for member, users in members.items():
            made = Contribution(self.layout(Purpose(plan.purpose)))
            for mine in (user.index for user in users):
                if plan.purpose == "train":
                    made.add("counts", np.ones(len(self.items[mine])), self.rng, rows=self.items[mine])
                else:
                    add_measures(made, np.array([one[mine] for one in self.measured.values()]), self.rng)
                made.count()
            yield member, made.codes()

    def recommend(self, model, user):
        return model["counts"]


SYSTEMS["popular"] = Offered(Server, Host, sums=("clear", "masked"))
