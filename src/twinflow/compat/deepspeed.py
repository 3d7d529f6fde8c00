"""`twinflow.compat.deepspeed` is the very module that `import deepspeed` gives after `twinflow.compat.install()`."""

from twinflow.compat.finder import make_top

make_top()
