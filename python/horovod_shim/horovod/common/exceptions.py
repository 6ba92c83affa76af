import sys

import gohvd.exceptions

sys.modules[__name__] = gohvd.exceptions
