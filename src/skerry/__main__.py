"""python -m skerry"""

from skerry.cli import main

if __name__ == "__main__":
    main()
