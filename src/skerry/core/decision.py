"""What is decided about a merge: a function of a look and of what it closes."""

from __future__ import annotations

from skerry.config import Config
from skerry.core.admission import rows_of
from skerry.core.facts import Decision, Part, Seen
from skerry.core.look import Close, View
from skerry.core.schedule import gain_of, recipe_of, sync_every_in, weight_of


def decision_of(close: Close, view: View, config: Config, seen: tuple[Seen, ...]) -> Decision:
    """Merge what is held of the fragment, by the recipe of the stage in which its round was opened.

    `seen` are the positions that no fact before this one holds.
    """
    p, state = close.fragment, view.state
    at, contributions = state.fragments[p], view.held.in_order(p)
    recipe, every = recipe_of(config, close.stage), close.sync_every
    rows = tuple(row for c in contributions for row in rows_of(c, state.ledger.settled(c.learner, c.life, p)))
    return Decision(
        epoch=state.epoch,
        fragment=p,
        version=at.version + 1,
        parent=at.digest,
        rule=recipe.rule,
        outer=recipe.outer,
        lr=recipe.lr,
        momentum=recipe.momentum,
        delay=recipe.delay,
        restart=recipe.restart,
        gain=gain_of(rows, at.merged_in, at.version + 1, every),
        codec="fp32" if close.stage is None else config.wire.codec_down,
        delta="fp32" if close.stage is None else "bf16",
        sync_every=sync_every_in(config.sync, close.stage),
        quorum=close.quorum,
        stage=close.stage,
        reason=close.reason,
        ready=close.ready,
        rows=rows,
        parts=tuple(Part(c.codec, c.base_version, weight_of(c.tokens, c.steps)) for c in contributions),
        seen=seen,
        progress=state.progress,
        open_s=view.now - close.opened_at,
        elapsed_s=view.elapsed_s,
        asked_every=every,
        orders=state.orders,
    )
