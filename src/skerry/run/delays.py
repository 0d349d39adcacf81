"""What the product's own work takes: encoding, adopting, looking through, merging, committing.

A run measures it and has it on its tape (`core/facts.py`, `Sample` and `Took`). Whoever lets a run pass in virtual time
or foresees one charges it: laboratory and twin by `proof/sim/workers.py`, the planner in its formulas.

Work on arrays is reckoned by the parameter, with what each piece costs by itself in it; so figures hold for fragments
of about the size that they were measured with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from skerry.core.facts import Committed, Fact, Sampled


class Delays(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of a learner's node thread, of one of the syncer's workers, and of the thread that decides; 0: none."""

    encode_ns: float = 0.0  # node thread, a parameter of a contribution: from its snapshot until it can leave
    adopt_ns: float = 0.0  # node thread, a parameter of a version: decode, check, prepare
    inspect_ns: float = 0.0  # worker, a parameter of a contribution: checksum, norms
    merge_ns: float = 0.0  # worker, a parameter of a merged fragment: sum, outer step, delta, hash, file
    commit_s: float = 0.0  # deciding thread, a merge that has ended: taken in, and on the tape

    def encode_s(self, parameters: float) -> float:
        return 1e-9 * self.encode_ns * parameters

    def adopt_s(self, parameters: float) -> float:
        return 1e-9 * self.adopt_ns * parameters

    def inspect_s(self, parameters: float) -> float:
        return 1e-9 * self.inspect_ns * parameters

    def merge_s(self, parameters: float) -> float:
        return 1e-9 * self.merge_ns * parameters


NONE = Delays()

# What all of a syncer's threads together need the interpreter for, for one contribution: from its bytes on a socket to
# the version that it is in on another. No tape can tell, and it is the same for fragments of any size (docs/LOG.md,
# "Python a merge").
PYTHON_S = 0.0006

# docs/LOG.md, "What the product's own work takes"
MEASURED = Delays(encode_ns=6.7, adopt_ns=4.4, inspect_ns=1.9, merge_ns=15.4, commit_s=0.0032)


def delays_of(facts: Iterable[Fact], sizes: Sequence[int]) -> Delays:
    """Means over a tape, whose fragments have these sizes; 0 where it measured nothing."""
    encoded = adopted = inspected = merged = merges = 0
    encode_s = adopt_s = inspect_s = merge_s = commit_s = 0.0
    for fact in facts:
        if isinstance(fact, Sampled):
            for sample in fact.samples:
                encoded, encode_s = encoded + sample.encoded, encode_s + sample.encode_s
                adopted, adopt_s = adopted + sample.adopted, adopt_s + sample.adopt_s
        elif isinstance(fact, Committed) and fact.took is not None:
            size, took = sizes[fact.decision.fragment], fact.took
            inspected, inspect_s = inspected + size * len(fact.decision.parts), inspect_s + took.inspect_s
            merged, merge_s = merged + size, merge_s + took.merge_s + took.put_s
            merges, commit_s = merges + 1, commit_s + took.taken_s + took.commit_s
    return Delays(
        encode_ns=1e9 * encode_s / max(1, encoded),
        adopt_ns=1e9 * adopt_s / max(1, adopted),
        inspect_ns=1e9 * inspect_s / max(1, inspected),
        merge_ns=1e9 * merge_s / max(1, merged),
        commit_s=commit_s / max(1, merges),
    )
