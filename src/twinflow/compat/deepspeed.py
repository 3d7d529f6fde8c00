# SPDX-License-Identifier: Apache-2.0
"""`twinflow.compat.deepspeed` is the module object that `import deepspeed` gives after `twinflow.compat.install()`."""

import sys

from twinflow.compat import CompatModule

sys.modules[__name__] = CompatModule("")
