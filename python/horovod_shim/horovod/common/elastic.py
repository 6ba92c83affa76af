import sys

import gohvd.elastic

sys.modules[__name__] = gohvd.elastic
