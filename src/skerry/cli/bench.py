"""skerry bench: measure, subject and reference in one run.

learner   what attaching to a syncer costs a training loop (key `ratio`: attached tokens/s over plain tokens/s)
"""

from __future__ import annotations

from collections.abc import Sequence

from skerry import cli
from skerry.errors import Refusal
from skerry.train.shapes import SHAPES


def run(words: Sequence[str]) -> int:
    parser = cli.Parser(prog="skerry bench", description=__doc__)
    parser.add_argument("subject", choices=["learner"])
    parser.add_argument("--model", choices=list(SHAPES), default="1m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="torch device of the loop")
    parser.add_argument("--steps", type=int, default=25, help="steps in one stretch")
    parser.add_argument("--pairs", type=int, default=15, help="plain and attached stretches, in alternation")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = cli.parse(parser, words)
    if overrides:
        raise Refusal(f"--{overrides[0][0]}: nothing is configured here")
    if min(options.steps, options.pairs, options.batch) < 1:
        raise Refusal("--steps, --pairs and --batch must be above zero")
    cli.need("torch", "torch", "skerry bench learner")
    from skerry.proof.bench.learner import measure

    result = measure(options.model, options.steps, options.pairs, options.batch, options.device)
    if options.json:
        cli.print_json(result)
    else:
        print(
            f"attached / plain: {result['ratio']:.3f} (from {result['ratio_min']:.3f} to {result['ratio_max']:.3f} "
            f"over {options.pairs} pairs of {options.steps} steps)\n"
            f"plain {result['plain_tokens_per_s']:,.0f} tokens/s, attached {result['attached_tokens_per_s']:,.0f}; "
            f"{result['merges']} merges meanwhile"
        )
    return 0
