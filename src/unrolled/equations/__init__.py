"""The mathematics, one file per layer: `<name>_forward` and, right below it, `<name>_backward`, in plain torch.

This is the specification: the pages in `docs/` derive these lines, and the core in `csrc/` is tested against them.
They run on any device and dtype. Forward lines are numbered; a backward line ends with the number it reverses.
"""
