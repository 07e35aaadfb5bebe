"""python -m unrolled"""

try:
    from unrolled.cli import main
except KeyboardInterrupt:
    raise SystemExit(130) from None

main()
