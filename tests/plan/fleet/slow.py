"""The goodput model chip by chip and step by step: slow, and too plain to be wrong."""

import numpy as np


def simulate_slowly(learners, slices, slice_chips, mtbi_s, step_s, pause_s, repairs_s, total_s, seed, rigid=False):
    """(goodput, uptime) of one trial: every chip of every learner is asked in every step whether it lives."""
    source = np.random.default_rng(seed)
    useful_s, down = 0.0, np.zeros(int(total_s), np.int64)  # how many learners stand still, second by second
    for _ in range(learners):
        now, is_there = 0.0, np.ones(slices, bool)
        back_at = np.full(slices, np.inf)

        def pass_time(now, seconds, is_there=is_there, back_at=back_at):
            """Whether a chip failed in the next seconds, and whether a slice came back."""
            is_failing = (source.random((slices, slice_chips)) < -np.expm1(-seconds / mtbi_s)).any(axis=1) & is_there
            if rigid:
                return is_failing.any(), False
            for n in np.flatnonzero(is_failing):
                back_at[n] = now + source.uniform(0, seconds) + repairs_s[source.integers(repairs_s.size)]
            is_there &= ~is_failing
            is_back = ~is_there & (back_at <= now + seconds)
            is_there |= is_back
            return is_failing.any(), is_back.any()

        while now < total_s:
            seconds = min(step_s, total_s - now)
            useful_s += seconds * is_there.sum() / slices
            failed, returned = pass_time(now, seconds)
            now += seconds
            if pause := pause_s * (failed + returned):
                pass_time(now, pause)
                down[int(now) : int(now + pause)] += 1
                now += pause
    return useful_s / (learners * total_s), float((down < learners).mean())
