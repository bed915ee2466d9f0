"""Transition tables that modules print in their docstrings, and what a state machine really does."""

from collections import defaultdict


def printed(text):
    """Return the phases that a printed table names, by event and phase."""
    lines = text.splitlines()
    first, second, last = (n for n, line in enumerate(lines) if line.startswith("==="))
    assert first + 2 == second
    marks = lines[first]
    starts = [n for n, mark in enumerate(marks) if mark == "=" and (n == 0 or marks[n - 1] == " ")]

    def cells(line):
        return [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]

    _, *phases = cells(lines[first + 1])
    found = {}
    for line in lines[second + 1 : last]:
        event, *after = cells(line)
        for phase, names in zip(phases, after, strict=True):
            found[event, phase] = set() if names == "-" else set(names.split(", "))
    return found


def reached(first, moves, key):
    """Yield every state that moves lead to, those with an equal key once."""
    known, waiting = {key(first)}, [first]
    while waiting:
        state = waiting.pop()
        yield state
        for after in moves(state):
            if key(after) not in known:
                known.add(key(after))
                waiting.append(after)


def observed(pairs):
    """Return the phases that were seen after an event in a phase; pairs are (event, phase, phase after it)."""
    found = defaultdict(set)
    for event, before, after in pairs:
        found[event, before.value].add(after.value)
    return found
