"""python -m unrolled"""

from unrolled.cli import main

main()
