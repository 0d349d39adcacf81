"""Makes the text the studies train on: the Python source of five published packages, 65 MB, the same everywhere.

    python experiments/corpus.py            # downloads with pip into experiments/corpus/, then checks the digest

Only .py files are kept, and nothing of a package is run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("sympy==1.13.3", "django==5.1.4", "networkx==3.4.2", "pandas==2.2.3", "sqlalchemy==2.0.36")
PLATFORM = ("--platform", "manylinux2014_x86_64", "--python-version", "3.11", "--only-binary", ":all:")
DIGEST = "9f7532a14b77773a4f2e8b5c429f81a3"


def main() -> None:
    target = Path(__file__).parent / "corpus"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *PLATFORM, "-d", folder]
        subprocess.run([*pip, *PACKAGES], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
    found = digest(target)
    if found != DIGEST:
        sys.exit(f"{target}: digest {found}, expected {DIGEST}: a package was published anew under the same version")
    print(f"{target}: {sum(f.stat().st_size for f in target.rglob('*.py')) / 1e6:.1f} MB, digest as expected")


def digest(folder: Path) -> str:
    from skerry.train.data import Corpus

    return Corpus.open(folder).digest


if __name__ == "__main__":
    main()
