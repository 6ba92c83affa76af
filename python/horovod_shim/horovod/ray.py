import sys

import gohvd.ray

sys.modules[__name__] = gohvd.ray
