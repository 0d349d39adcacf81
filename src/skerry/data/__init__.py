"""What is trained on: text files, and packs of tokens that are mapped into memory. No torch here.

`skerry.data.Pack(path)` opens a pack that `skerry data pack` has written, `pack.batches(…)` is a learner's way through
it. `skerry.data.Writer` writes one from tokens of your own. The format and the order are in docs/DATA.md.
"""

from skerry.data.pack import Pack
from skerry.data.write import Writer

__all__ = ["Pack", "Writer"]
