"""`twinflow.compat.deepspeed` is the module object that `import deepspeed` gives after `twinflow.compat.install()`."""

from twinflow.compat.finder import make_top

make_top()
