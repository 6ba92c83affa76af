import sys

import gohvd.process_sets

sys.modules[__name__] = gohvd.process_sets
