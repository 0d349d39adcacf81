"""What became of a run, as one HTML file that needs nobody: no network, no script, no other file.

`numbers` reads a run directory, `charts` draws, `document` writes a run's report and `compare` that of two. Everything
that a name, a configuration or a command line has a hand in is text: it is escaped where it is written (`page`).
"""
